// How an op tells the recorder of CPU graphs (graph_op.cpp) a shorter way to make the same call again.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <functional>

namespace {

// Makes a call again: the same addresses, other values. False, with nothing done, if the values need the op itself.
using Replay = std::function<bool()>;

struct Recorder {
  bool (*wants)();  // whether the op that this thread calls is being recorded
  void (*take)(Replay*, const void*);  // moves it away; the memory of its one result
} recorder;

// The same tensor, which does not keep its memory.
at::Tensor unowned(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().requires_grad(false));
}

bool is_recorded() { return recorder.wants && recorder.wants(); }

// Offers what ``function`` returns, which writes ``result``, if it is wanted.
template <typename Function> void offer(const at::Tensor& result, Function&& function) {
  if (!is_recorded()) return;
  Replay replay = function();
  recorder.take(&replay, result.const_data_ptr());
}

}  // namespace
