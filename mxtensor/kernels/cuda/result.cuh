// The result: what is done to a sum of products before it is written, once, in the type that is wanted.

DEVICE float number(const void* at, u64 i, int type) {
    if (type == FLOAT) return load_fresh(static_cast<const float*>(at) + i);
    u32 bits = load_fresh(static_cast<const u16*>(at) + i);
    return type == FLOAT16 ? float_of_half(bits) : float_of_bits(bits << 16);
}

// Whether a scale of row n of w is a NaN. Its block has made the sum infinite, if not a NaN already.
DEVICE bool has_nan(const Arguments& a, const u8* scales, u32 n) {
    bool found = false;
    scales += u64(row_of_scales(n)) * a.scales_stride;
    for (u32 i = 0; i < a.scales_stride; i++) found |= scales[i] == 255;
    return found;
}

DEVICE float global_scale_of(const Weight& w) { return w.global_scale ? *w.global_scale : 1.0f; }

// What multiplies every sum of the tensor; the sums are 2^-EXPONENT of what they should be.
template <int EXPONENT> DEVICE float factor_of_all(const Arguments& a, float global_scale) {
    float factor = a.alpha * float_of_bits((EXPONENT + 127) << 23) * global_scale;
    if (a.x_global_scale) factor *= load_fresh(a.x_global_scale);
    return factor;
}

// A sum of row n of w that is infinite, a NaN if that is what a scale made of it.
DEVICE float with_nans(const Arguments& a, const u8* scales, u32 n, float sum) {
    if constexpr (SCALE == E8M0)
        if ((bits_of_float(sum) & 0x7FFFFFFF) == 0x7F800000 && has_nan(a, scales, n)) return float_of_bits(0x7FFFFFFF);
    return sum;
}

// Element (m, n) of the result from the sum of its products, with what belongs at the end; ``factor`` of the tensor.
DEVICE float result(const Arguments& a, const Weight& w, const u8* scales, u64 m, u32 n, float sum, float factor) {
    if constexpr (SCALE == AT_THE_END) sum *= reinterpret_cast<const float*>(scales)[row_of_scales(n)];
    sum *= factor;
    if (w.bias) sum += a.beta * number(w.bias, m * w.bias_stride + n, BIAS);
    return sum;
}
DEVICE u16 sixteen_bits(float value) { return RESULT == FLOAT16 ? half_of(value) : bfloat16_of(value); }
DEVICE void finish(const Arguments& a, const Weight& w, const u8* scales, u64 m, u32 n, float sum, float factor) {
    float value = result(a, w, scales, m, n, sum, factor);
    u64 to = m * w.n + n;
    if constexpr (RESULT == FLOAT) static_cast<float*>(w.y)[to] = value;
    else static_cast<u16*>(w.y)[to] = sixteen_bits(value);
}

// Elements (m, n) to (m, n + 3), as far as there are so many.
DEVICE void finish_four(const Arguments& a, const Weight& w, u64 m, u32 n, const float (&sum)[4], float factor) {
    if (RESULT == FLOAT || w.n % 4) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (n + e < w.n) finish(a, w, w.scales, m, n + e, sum[e], factor);
    } else if (n < w.n) {
        u16 bits[4];
#pragma unroll
        for (int e = 0; e < 4; e++) bits[e] = sixteen_bits(result(a, w, w.scales, m, n + e, sum[e], factor));
        uint2 words = {bits[0] | u32(bits[1]) << 16, bits[2] | u32(bits[3]) << 16};
        *reinterpret_cast<uint2*>(static_cast<u16*>(w.y) + m * w.n + n) = words;
    }
}
