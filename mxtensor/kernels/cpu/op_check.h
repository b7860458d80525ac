// Checks of arguments. Messages are put together without C++ streams: where the compiler's libstdc++ is not the one that
// torch was built with, a stream that is given a number may crash the process instead of raising the error.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "problem.h"

namespace {

std::string text(const char* words) { return words; }
std::string text(int64_t number) { return std::to_string(number); }
std::string text(at::ScalarType type) { return c10::toString(type); }
std::string text(at::IntArrayRef numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); i++) out += (i ? ", " : "") + std::to_string(numbers[i]);
  return out + "]";
}

template <class... Pieces>
std::string joined(const Pieces&... pieces) {
  return (std::string() + ... + text(pieces));
}

}  // namespace

// Raises ValueError with the joined pieces if the condition does not hold; they may be words, integers, sizes and types.
#define MX_CHECK_VALUE(condition, ...) TORCH_CHECK_VALUE(condition, joined(__VA_ARGS__))

namespace {

// The Kind (format.h) of the values that an op of this name takes.
int32_t kind_of(at::ScalarType type, const char* op) {
  MX_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "mxtensor::", op,
                 " takes float32, bfloat16 and float16, not ", type);
  return type == at::kFloat ? FLOAT32 : type == at::kBFloat16 ? BFLOAT16 : FLOAT16;
}

}  // namespace
