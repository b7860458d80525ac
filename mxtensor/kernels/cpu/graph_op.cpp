// CPU graphs: the calls of a compiled graph, recorded once and then made again without Python.
//
// A call is a kernel of torch's compiler, by address, or an op of torch. All memory between the calls is that of the
// recording; what comes from outside is compared by address, or copied into memory of the graph.
#include <ATen/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "op_check.h"
#include "op_recorder.h"

namespace {

using at::Tensor;
using c10::IValue;

constexpr size_t MOST_ARGUMENTS = 128;  // of a kernel

template <size_t... I>
void call_kernel(void* kernel, const uint64_t* args, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(uint64_t(I))...)>(kernel)(args[I]...);
}
using Caller = void (*)(void*, const uint64_t*);
template <size_t... N>
constexpr std::array<Caller, sizeof...(N)> callers_of(std::index_sequence<N...>) {
  return {[](void* kernel, const uint64_t* args) { call_kernel(kernel, args, std::make_index_sequence<N>()); }...};
}
constexpr auto CALLERS = callers_of(std::make_index_sequence<MOST_ARGUMENTS + 1>());

struct Call {
  void* kernel = nullptr;  // otherwise an op
  std::vector<uint64_t> args;
  std::optional<c10::OperatorHandle> op;
  std::vector<IValue> inputs;
  std::vector<std::pair<size_t, Tensor>> results;  // number of a result, and the memory in which the next calls read it
  Replay replay;  // or empty; writes its one result, where it is
  const void* result = nullptr;
};

// Where an input was. A graph does not own its memory: a run gets the input again, or the graph holds the tensor, which
// may have got other memory.
struct Place {
  const void* address;  // nullptr: anywhere, the input is copied
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  explicit Place(const Tensor& t) : address(t.const_data_ptr()), sizes(t.sizes().vec()), strides(t.strides().vec()), dtype(t.scalar_type()) {}
  bool holds(const Tensor& t) const {
    return (!address || address == t.const_data_ptr()) && t.scalar_type() == dtype && t.sizes() == at::IntArrayRef(sizes) &&
           t.strides() == at::IntArrayRef(strides);
  }
};

struct Graph {
  std::vector<Call> calls;
  std::string refusal;
  std::vector<Place> given;  // inputs that a run passes
  std::vector<std::pair<Tensor, Place>> fixed;  // inputs that it does not pass
  std::vector<std::pair<size_t, Tensor>> copied;  // number of a given input, and its memory in the graph
  std::vector<Tensor> outputs;
};

thread_local std::unique_ptr<Graph> recording;
thread_local at::CallbackHandle callback = 0;
thread_local int depth = 0;   // ops that run at this moment: one of the recording, and those that it calls
thread_local int nested = 0;  // those among them that are another op; a mode of torch calls the same op again
std::mutex lock;
std::unordered_map<int64_t, std::shared_ptr<Graph>> graphs;
int64_t next = 0;

void refuse(const std::string& why) {
  if (recording->refusal.empty()) recording->refusal = why;
}

// The tensors of a value: a tensor, a list of tensors or nothing; false for others.
bool tensors_of(const IValue& value, std::vector<Tensor>& found) {
  if (value.isTensor()) {
    found.push_back(value.toTensor());
    return true;
  }
  if (!value.isTensorList()) return value.isNone();
  for (const Tensor& t : value.toTensorVector()) found.push_back(t);
  return true;
}

using Memory = std::unordered_set<const void*>;

const void* storage_of(const Tensor& t) { return t.defined() ? t.storage().unsafeGetStorageImpl() : nullptr; }

Memory memory_of(const std::vector<Tensor>& tensors) {
  Memory found;
  for (const Tensor& t : tensors)
    if (t.defined()) found.insert(storage_of(t));
  return found;
}

// The same value; tensors in ``memory`` do not keep it.
IValue unowned(const IValue& value, const Memory& memory) {
  if (value.isTensor() && memory.count(storage_of(value.toTensor()))) return unowned(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(memory.count(storage_of(t)) ? unowned(t) : t);
    return list;
  }
  return value;
}

// Whether calls of a function are those of an op, not a mark for profilers, and belong to the recording.
bool is_observed(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  return recording && name && name->name != "mxtensor::cpu_graph_end";
}

bool is_op_of_call(const c10::OperatorName& name) {
  const auto& op = recording->calls.back().op;
  return op && op->operator_name() == name;
}

std::unique_ptr<at::ObserverContext> op_starts(const at::RecordFunction& function) {
  if (!is_observed(function)) return nullptr;
  const auto name = function.operator_name();
  if (depth++) {
    nested += !is_op_of_call(*name);
    return nullptr;
  }
  Call& call = recording->calls.emplace_back();
  call.op = c10::Dispatcher::singleton().findSchema(*name);
  const auto inputs = function.inputs();
  call.inputs.assign(inputs.begin(), inputs.end());
  if (!call.op || inputs.size() != call.op->schema().arguments().size()) refuse(name->name + " does not show its arguments");
  return nullptr;
}

void op_ends(const at::RecordFunction& function, at::ObserverContext*) {
  if (!is_observed(function)) return;
  if (--depth) {
    nested -= !is_op_of_call(*function.operator_name());
    return;
  }
  Call& call = recording->calls.back();
  if (!call.op) return;
  const std::string name = call.op->schema().name();
  if (call.op->hasTag(at::Tag::dynamic_output_shape) || call.op->hasTag(at::Tag::data_dependent_output))
    return refuse(name + " has results whose size depends on values");
  std::vector<Tensor> given, made;
  for (const IValue& value : call.inputs) tensors_of(value, given);
  for (const IValue& value : function.outputs())
    if (!tensors_of(value, made)) return refuse(name + " returns other values than tensors");
  const Memory before = memory_of(given);
  for (size_t i = 0; i < made.size(); i++)
    if (made[i].defined() && !before.count(storage_of(made[i]))) call.results.emplace_back(i, made[i]);
  if (made.size() != 1 || call.results.size() != 1 || made[0].const_data_ptr() != call.result) call.replay = nullptr;
  const bool writes = call.op->schema().is_mutable(), checks = made.empty();
  if (call.results.empty() && !writes && !checks) recording->calls.pop_back();  // views of memory that stays where it is
}

// copy_ of the same shape and dtype, without its preparation where memory is dense.
void copy_to(const Tensor& to, const Tensor& from) {
  if (to.is_contiguous() && from.is_contiguous() && to.nbytes() == from.nbytes()) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  else to.copy_(from);
}

// Makes a recorded call: its kernel, the shorter way that its op offered, or the op itself.
void repeat(const Call& call) {
  if (call.kernel) return CALLERS[call.args.size()](call.kernel, call.args.data());
  if (call.replay && call.replay()) return;
  std::vector<IValue> stack = call.inputs;
  call.op->callBoxed(&stack);
  if (call.results.empty()) return;
  std::vector<Tensor> made;
  for (const IValue& value : stack) tensors_of(value, made);
  for (const auto& [i, memory] : call.results) copy_to(memory, made[i]);
}

// The outputs for the caller, who may keep them: not the memory that the next run writes.
std::vector<Tensor> results_of(const Graph& graph) {
  std::vector<Tensor> results;
  for (const Tensor& t : graph.outputs) results.push_back(t.clone());
  return results;
}

// Ends the recording of this thread. ``outputs`` are the results, ``inputs`` the tensors from outside. ``given`` numbers
// those that later runs pass, in their order; of these, ``copied`` are memory of the graph, into which a run copies its own.
std::tuple<int64_t, std::vector<Tensor>> cpu_graph_end(
    at::TensorList inputs, at::IntArrayRef given, at::IntArrayRef copied, at::TensorList outputs) {
  MX_CHECK_VALUE(recording, "mxtensor::cpu_graph_end: this thread records nothing");
  at::removeCallback(callback);
  std::shared_ptr<Graph> graph = std::move(recording);
  depth = nested = 0;
  TORCH_CHECK_NOT_IMPLEMENTED(graph->refusal.empty(), graph->refusal);
  std::vector<Tensor> fixed;
  for (size_t i = 0; i < inputs.size(); i++) {
    const Tensor& t = inputs[i];
    const auto is_in = [i](at::IntArrayRef places) { return std::find(places.begin(), places.end(), int64_t(i)) != places.end(); };
    const bool is_copied = is_in(copied);
    if (!is_copied) fixed.push_back(t);
    if (!is_in(given)) {
      graph->fixed.emplace_back(t, Place(t));
      continue;
    }
    Place& place = graph->given.emplace_back(t);
    if (is_copied) place.address = nullptr, graph->copied.emplace_back(graph->given.size() - 1, t);
  }
  const Memory outside = memory_of(fixed);
  for (Call& call : graph->calls)
    for (IValue& value : call.inputs) value = unowned(value, outside);
  for (const Tensor& t : outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!outside.count(storage_of(t)), "an output is a view of an input");
    graph->outputs.push_back(t);
  }
  const std::lock_guard<std::mutex> guard(lock);
  graphs[next] = graph;
  return {next++, results_of(*graph)};
}

// The results of the recorded calls with these inputs; none if an input is elsewhere than in the recording.
std::vector<Tensor> cpu_graph_run(at::TensorList inputs, int64_t number) {
  std::shared_ptr<Graph> graph;
  {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = graphs.find(number);
    MX_CHECK_VALUE(found != graphs.end() && found->second->given.size() == inputs.size(),
                   "mxtensor::cpu_graph_run: graph ", number, " was not recorded with ", int64_t(inputs.size()), " inputs");
    graph = found->second;
  }
  for (size_t i = 0; i < inputs.size(); i++)
    if (!graph->given[i].holds(inputs[i])) return {};
  for (const auto& [t, place] : graph->fixed)
    if (!place.holds(t)) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& [i, memory] : graph->copied) copy_to(memory, inputs[i]);
  for (const Call& call : graph->calls) repeat(call);
  return results_of(*graph);
}

TORCH_LIBRARY_IMPL(mxtensor, CPU, m) {
  m.impl("cpu_graph_end", cpu_graph_end);
  m.impl("cpu_graph_run", cpu_graph_run);
}

}  // namespace

extern "C" {

void mx_graph_begin() {
  recording = std::make_unique<Graph>(), depth = nested = 0;
  callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(op_starts, op_ends).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}

// A kernel with ``count`` arguments, addresses or integers of 64 bits, that is called now.
void mx_graph_kernel(void* kernel, const uint64_t* args, int64_t count) {
  if (!recording) return;
  if (size_t(count) > MOST_ARGUMENTS) return refuse("a kernel has " + std::to_string(count) + " arguments");
  Call call;
  call.kernel = kernel, call.args.assign(args, args + count);
  recording->calls.push_back(std::move(call));
}

// Whether the op that runs is one of the recording, not one that such an op calls.
bool mx_graph_wants() { return recording && depth && !nested; }
void mx_graph_take(Replay* replay, const void* result) {
  recording->calls.back().replay = std::move(*replay), recording->calls.back().result = result;
}

void mx_graph_refuse(const char* why) {
  if (recording) refuse(why);
}

// Ends a recording that failed.
void mx_graph_drop() {
  if (!recording) return;
  at::removeCallback(callback);
  recording.reset(), depth = nested = 0;
}

void mx_graph_free(int64_t number) {
  const std::lock_guard<std::mutex> guard(lock);
  graphs.erase(number);
}
}
