// The result: applies scales, alpha and bias to a finished sum and writes it, rounded once to the result's dtype.

// The bias of element (m, n) of the result.
DEVICE float bias_at(const Weight& w, u64 m, u32 n) {
    if (!w.bias) return 0;
    u64 at = m * w.bias_stride + n;
    if constexpr (BIAS == FLOAT) return load_fresh(static_cast<const float*>(w.bias) + at);
    u32 bits = load_fresh(static_cast<const u16*>(w.bias) + at);
    return BIAS == FLOAT16 ? float_of_half(bits) : float_of_bits(bits << 16);
}
// The same, where ``common`` is the bias of the column for all rows of x, which is read once.
DEVICE float bias_of(const Weight& w, u64 m, u32 n, float common) { return w.bias_stride ? bias_at(w, m, n) : common; }

// Biases of elements (m, n) to (m, n + 3), as far as they exist.
DEVICE void biases_at(float (&bias)[4], const Weight& w, u64 m, u32 n) {
#pragma unroll
    for (int e = 0; e < 4; e++) bias[e] = n + e < w.n ? bias_at(w, m, n + e) : 0;
}
DEVICE void biases_of(float (&bias)[4], const Weight& w, u64 m, u32 n, const float (&common)[4]) {
    if (w.bias_stride) biases_at(bias, w, m, n);
    else
#pragma unroll
        for (int e = 0; e < 4; e++) bias[e] = common[e];
}

// Whether a scale of row n of w is NaN. Its block has made the sum infinite or NaN already.
DEVICE bool has_nan(const Arguments& a, const u8* scales, u32 n) {
    bool found = false;
    scales += u64(row_of_scales(n)) * a.scales_stride;
    for (u32 i = 0; i < a.scales_stride; i++) found |= scales[i] == 255;
    return found;
}

DEVICE float global_scale_of(const Weight& w) { return w.global_scale ? *w.global_scale : 1.0f; }

// What every sum of the tensor is multiplied by; the sums are 2^-EXPONENT times their value.
template <int EXPONENT> DEVICE float tensor_scale_of(const Arguments& a, float global_scale) {
    float tensor_scale = a.alpha * float_of_bits((EXPONENT + 127) << 23) * global_scale;
    if (a.x_global_scale) tensor_scale *= load_fresh(a.x_global_scale);
    return tensor_scale;
}

// The sum of row n of w, or NaN if it is infinite because a scale is NaN.
DEVICE float with_nans(const Arguments& a, const u8* scales, u32 n, float sum) {
    if constexpr (SCALE == E8M0)
        if ((bits_of_float(sum) & 0x7FFFFFFF) == 0x7F800000 && has_nan(a, scales, n)) return float_of_bits(0x7FFFFFFF);
    return sum;
}

// An element of the result in row n of w, from its sum; ``tensor_scale``: what all sums are multiplied by.
DEVICE float result(
    const Arguments& a, const Weight& w, const u8* scales, u32 n, float sum, float tensor_scale, float bias) {
    if constexpr (SCALE == AT_THE_END) sum *= reinterpret_cast<const float*>(scales)[row_of_scales(n)];
    sum *= tensor_scale;
    if (w.bias) sum += a.beta * bias;
    return sum;
}
DEVICE u16 sixteen_bits(float value) { return RESULT == FLOAT16 ? half_of(value) : bfloat16_of(value); }
DEVICE void finish(
    const Arguments& a, const Weight& w, const u8* scales, u64 m, u32 n, float sum, float tensor_scale, float bias) {
    float value = result(a, w, scales, n, sum, tensor_scale, bias);
    u64 to = m * w.n + n;
    if constexpr (RESULT == FLOAT) static_cast<float*>(w.y)[to] = value;
    else static_cast<u16*>(w.y)[to] = sixteen_bits(value);
}

// Writes elements (m, n) to (m, n + 3), as far as they exist.
DEVICE void finish_four(
    const Arguments& a, const Weight& w, u64 m, u32 n, const float (&sum)[4], float tensor_scale,
    const float (&bias)[4]) {
    if (RESULT == FLOAT || w.n % 4) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (n + e < w.n) finish(a, w, w.scales, m, n + e, sum[e], tensor_scale, bias[e]);
    } else if (n < w.n) {
        u16 bits[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            bits[e] = sixteen_bits(result(a, w, w.scales, n + e, sum[e], tensor_scale, bias[e]));
        uint2 words = {bits[0] | u32(bits[1]) << 16, bits[2] | u32(bits[3]) << 16};
        *reinterpret_cast<uint2*>(static_cast<u16*>(w.y) + m * w.n + n) = words;
    }
}
