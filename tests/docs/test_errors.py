"""tests/docs/error_rows.md is true and complete: each row raises what it says, and each raise has a row."""

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch

import mxtensor as mx
from mxtensor.training.training_weight import values_of
from tests.docs.error_rows import PAGE, ROWS, forced, namespace, pattern
from tests.docs.inner_sentences import INNER
from tests.helpers.compare import components_of

ROOT = Path(__file__).resolve().parents[2]
KINDS = (
    ValueError, TypeError, IndexError, NotImplementedError, RuntimeError, ImportError, AttributeError, FileExistsError,
    FileNotFoundError, IsADirectoryError, ModuleNotFoundError, UserWarning,
)  # fmt: skip

NEVER_SEEN = {
    # the text of a KeyError is in quotes: tests/te/test_fp8_meta.py
    "fp8_meta of {value} has no {value}; it has {value}",
    "fp8_meta of {value} has no {value} before its first pass under a recipe: {value}",
    "fp8_meta of {value} has no {value} with {value}, whose scales belong to single tensors; read the cast from "
    "module.quantizers[{value}]",
    # needs ranks with different recipes: tests/distributed/test_expert_parallel.py
    "dispatch_tokens: ranks {value} of the group send rows in another form than this one ({value} columns, {value}, "
    "{value}); give all ranks one recipe and tokens of one width and dtype",
    # a library of NVIDIA fails, and a call of our own with too few addresses: tests/kernels/runtime/test_host_calls.py
    "cuBLASLt returned status {value}",
    "takes a stream and {value} addresses, got {value} values",
    # needs a model of transformers: tests/checkpoints/test_transformers_names.py
    "convert: nothing was quantized: readers of the layout {value} split, join, transpose or share the {value} "
    "matrices of {value}, such as {value}, before they look for codes; choose another layout, such as native",
    # need a folder that exists, and an error of a layer: tests/calibration/test_calibrate.py
    "calibrate: {value} has the state of a calibration with other {value}; pass another folder, or remove it",
    "calibrate: {value}: {value}",
    # need torchao: tests/core/test_peer_names.py
    "{value} is quantized already, by {value}; pass the original values, or those of its dequantize()",
    "cannot quantize with {value}{value}",
    # need a working directory, and a folder that is filled meanwhile: tests/checkpoints/test_destination.py
    "{value} is the working directory or a mount point, which cannot be replaced; pass an empty folder or a new one",
    "{value} was empty, and holds {value} now; choose another destination",
    # need a file, a checkpoint, a model that returns no tensor: tests/convert/test_plan.py, tests/checkpoints,
    # tests/calibration/test_planner.py
    "{value} was not written by mx.Plan.save: {value}; make one by mx.plan or `mxtensor plan`",
    "it has no {value}",
    "version {value}, measure {value}",
    "a weight has a number of bytes and an error for each format",
    "convert: no tensor of the checkpoint has the name {value}{value} of the dict of configs",
    "plan: the model returns {value}, which has no gradient; pass measure='layer'",
    "plan: {value} trains, and stores no codes; pass a format such as 'mxfp8-weight-only'",
    # need a recipe that trains, layers that share a weight, experts: tests/convert/test_qat.py
    "quantize_: quantization-aware training simulates a format for inference, and {value} trains ({value}); pass a "
    "format such as 'mxfp4'",
    "quantize_: {value} is also the weight of {value}, which would not be trained with rounded values; leave it out by "
    "filter_fn",
    "quantize_: {value}{value} stay in high precision: the step 'prepare' is for nn.Linear only",
    "quantize_ changed nothing: no nn.Linear passed the filter of the step 'prepare'",
    "quantize_ changed nothing: no nn.Linear passed the filter of the step 'observe'",
    "quantize_ changed nothing: no layer is prepared; call it with step='prepare' or 'observe' before",
    # need a block of transformers, a model that returns no tensor: tests/calibration/test_smoothing.py
    "{value}: block {value} ({value}) computes something else when channels of its norms are scaled and the layers "
    "after them scale back (its output changes by {value}); leave it out of method",
    "{value}: block {value} ({value}) returns {value}, which has no floating-point tensor to compare; leave it out of "
    "method",
    # need layers that are prepared: tests/convert/test_steps.py
    "quantize_: {value} has seen inputs with the amax {value}; run data through the model between the steps 'observe' "
    "and 'convert'",
    "quantize_: {value} is float16, in which outputs over a static scale may be too large; use bfloat16",
    # where transformers is not installed, and what transformers catches: tests/integrations/test_kv_cache.py
    "mx.KVCache needs transformers 5: pip install 'transformers>=5' ({value})",
    "batch_size: the cache has no tokens yet",
    # caught, and raised with the name of the weight
    "the inputs of the layer are not all finite; calibrate with data that the model can read",
    # they show as the end of "... cannot be read as GGUF", and of "... cannot be read by torch.load"
    "two tensors have the same name",
    "the bytes of {value} and {value} overlap",
    "it is part {value} of {value} of a model; join them by `llama-gguf-split --merge` with the first part and a new "
    "file",
    "the file ends before byte {value} of the header and {value} entries",
    "an array of the header has {value} entries; at most {value} are read",
    "an array of the header has entries of the type {value}",
    "its record {value} is compressed, which torch.save does not do",
    # of a pickle that torchao did not write: tests/checkpoints/test_mutations.py
    "torchao's {value} needs the tensors qdata and scale, got {value}",
    "a tensor of torchao's {value} was only read from a file; it cannot run {value}",
    # of a model of transformers and its adapters: tests/integrations/test_offload.py, tests/integrations/test_peft.py,
    # tests/integrations/test_peft_inits.py
    "peft: {value} weights are in {value}, and the initialization of the adapters took a part out of them: the rest "
    "was rounded again. The rounding has {value} of the norm of that part, {value} in {value}. To lose nothing, use "
    "init_lora_weights=True; or make the adapters for the model in high precision, and quantize its base layers: "
    "quantize_(model, format, lambda module, name: name.endswith('base_layer'))",
    "weights that are quantized while they are loaded are in no file; save the quantized model, or use `mxtensor "
    "quantize`, and load that with 'disk' in device_map",
    "{value}: {value} weights are in {value}, and their sums with the adapters were rounded: the rounding has "
    "{value} of the norm of what the adapters change, {value} in {value}. To lose less, keep the adapters, or merge "
    "them into the model in high precision and quantize that",
    # needs ranks: tests/distributed/test_pretrained.py
    "{value} is quantized in the checkpoint, and ranks cannot read it in parts: {value}; load the high-precision "
    "checkpoint with quantization_config=mx.TransformersConfig(format)",
    # need accelerate: tests/integrations/test_accelerate.py
    "cpu_ram_efficient_loading sends values from rank 0 to the others, and {value} is an MXTensor in {value}; set "
    "cpu_ram_efficient_loading=False (fsdp_cpu_ram_efficient_loading: false), and load the quantized model on every "
    "rank",
    "{value} of this checkpoint has the amax histories of delayed scaling, and accelerate puts only parameters and "
    "buffers on the devices of a device_map: call load_checkpoint_in_model(model, checkpoint) without one, and then "
    "dispatch_model(model, device_map)",
    # of models of transformers: tests/integrations/test_attention.py
    'attention of {value} {value}, which "{value}" leaves out; use model.set_attn_implementation("{value}")',
    '{value} computes attention itself, and does not call "{value}"; load it with attn_implementation="eager"',
    # mx.tune needs a GPU
    "tune needs a model with quantized layers on a CUDA device: mx.quantize_(model.cuda(), 'mxfp8')",
    "{value} is not a file of --times: {value}",
    "there is no cost model of {value}; write one with python -m mxtensor.report.costs",
    # no format refuses the shape of a matrix: tests/convert/test_whole.py
    "quantize_: {value} {value}: {value}",
    # needs a module that is gone: tests/convert/test_instance_methods.py
    "{value}: the module is gone that quantize_ converted; copy modules by copy.deepcopy",
    # raised and caught inside ops/functional.py; they show as the reason in explain()
    "not one product",
    "a shared dimension differs in size",
    # checked earlier by ops/matmul.py; tests/kernels call the products themselves
    "{value}: the contracted dimensions differ: {value} has {value} columns, the other operand {value} rows",
    # raised for tensors on two devices, for two dtypes and for inference mode: tests/docs/wrong_calls.py
    "{value}: query, key and value need one dtype and one device, got {value}",
    "apply_rotary_pos_emb: t is on {value}, freqs on {value}; move one with .to()",
    "TransformerLayer: layer_type={value} {value} encoder_output{value}",
    "matmul: both operands need 1 dimension or more, got {value}; use * for a number",
    # raised inside a kernel; it shows as the end of "the kernel ... failed"
    "cublasGemmEx returned status {value}",
    # of arguments on a CUDA device
    "{value} takes one or two scales, a bias on {value} and gives bfloat16 or float32",
    # of a machine without a folder that can be written; it shows as "quantize.cpp did not build: ..." in explain():
    # tests/kernels/runtime/test_disk_cache.py
    "no folder for compiled kernels can be written; set XDG_CACHE_HOME to one of this user",
    # of an environment variable, another machine, a CUDA device: tests/kernels/gemm/test_cpu_codes.py
    "{value} is {value}; this processor runs {value}",
    "{value} needs tensors on the CPU, not on {value}; use .cpu()",
    "{value} is in a graph that was compiled elsewhere, and {value}",
    # needs two ranks: tests/test_fsdp.py
    "ranks do not gather the weight {value} alike: {value}; give quantize_ the same recipe on every rank",
    # of a disk that is full, or not shared: tests/test_dcp.py
    "{value} of {value} items were not written to {value}",
    "{value} has no {value}, which another rank has written; give all ranks a folder that they share",
    # of a config that `python -m mxtensor.report.tune` chooses itself; the heuristics choose one that fits
    "a product of {value}x{value}x{value} by {value} does not fit in the shared memory of this device "
    "({value} bytes per block)",
    "{value} cannot run {value}x{value} in {value}, {value} groups, aligned to {value} bytes; "
    "leave the config out to have one chosen",
    # torch.jit.trace warns that it is deprecated: tests/tensor/test_life.py
    "TorchScript (torch.jit.trace, torch.jit.script, the ONNX exporter with dynamo=False) cannot record {value}: a "
    "saved program would compute with zeros; use torch.export or torch.compile, or a model in high precision",
    "linear: torch.jit.trace cannot record a layer that trains quantized; use torch.export or torch.compile, "
    "or trace a model that was quantized for inference",
    "FakeQuantizer: torch.jit.trace cannot record the rounding; use torch.export or torch.compile",
    # of a compiled graph: tests/ops/test_view_writes.py
    "a view {value} of an MXTensor in {value} cannot be written in a graph that has only the view: it shares scales or "
    "copies with the whole; pass the whole tensor to the graph and write a view of it there",
    "a graph cannot return a view {value} that cuts the blocks of an MXTensor and was made before a write in the "
    "graph; make the view after the write, or return a clone() of it",
    # of arguments of an op on a CUDA device, which the package makes itself: tests/kernels/gemm/test_fp8_rows.py
    "{value} needs 1 to {value} groups and a block of multiples of {value}; got {value}, {value}",
    "{value} needs contiguous tensors, K and N in multiples of {value}; got {value}",
    "{value} cannot cast to {value}: {value}",
    "{value}: codes, row scales, flags and rows of scales must be contiguous; use contiguous()",
    "{value} writes bfloat16 or float16 rows of a multiple of {value} values; not {value}",
    # of a disk that is full: tests/checkpoints/test_files.py
    "{value} cannot be written: {value}",
    # of GGUF, whose package is an extra: tests/checkpoints/test_peers.py
    "{value} cannot be read: {value}",
    "{value} cannot be read as GGUF: {value}",
    "MXFP4 has whole blocks of 32 values, got the shape {value}",
    "two tensors are called {value}",
    "the package gguf does not dequantize {value}",
    "{value}: codes in {value} with {value}, which multiplies the results of this layer in llama.cpp and is not read "
    "here; use a file without such scales",
    "{value} has {value} GGUF files; pass one of them: {value} ...",
    # of packages that are not installed
    "this checkpoint needs the package {value}: pip install {value}",
    "TransformersConfig needs transformers 5: pip install 'transformers>=5' ({value})",
    # they show inside "the metadata of tensor ... is not valid": tests/checkpoints/test_files.py
    "copies must be of {value}, got {value}",
    "each copy has 2 or 3 tensors, got {value}",
    # of checkpoints that are large, that change while they are read, or that have several files:
    # tests/checkpoints/test_files.py
    "{value} has {value} bytes; at most {value} are read",
    "the file ends {value} bytes too early",
    "tensor {value} is in two files: {value} and {value}",
    "the global scale is {value}, which has no reciprocal to store",
    "{value} has a zero point, which is not supported",
    # raised inside transformers' from_pretrained: tests/integrations/test_transformers.py and test_transformers_load.py
    "{value}: the checkpoint lacks {value}{value}",
    "this model was quantized tensor by tensor; its configuration names no format",
    "accelerate's offload to disk stores plain values, not codes; leave 'disk' out of device_map",
    "{value} and {value} other static scales of inputs are in the checkpoint, and {value} has no linear layer of their "
    "names to take them; quantize the high-precision checkpoint with quantization_config=mx.TransformersConfig(format)",
    # tests/integrations/test_static_scales.py
    "Trainer: {value} weights, {value} of the model's values, are codes, which do not train, such as {value}; to train "
    "them, load the model in high precision and call mx.quantize_ with a training recipe, such as "
    "mx.recipe.MXFP8BlockScaling(), or with step='prepare'; to leave them as they are, add an adapter (peft's LoRA), "
    "or freeze the other parameters that shall not train",  # tests/integrations/test_trainer.py
    "{value} and {value} other quantized tensors of the checkpoint cannot be stacked, as {value} stacks experts: the "
    "formats differ, or the global scales (NVFP4), or blocks do not end with a matrix; quantize the high-precision "
    "checkpoint with quantization_config=mx.TransformersConfig(format)",
    "{value} has no parameter for any of the {value} quantized tensors of the checkpoint, such as {value}; load a "
    "class whose parameters have these names, such as the one in config.json",
    "{value}: the quantization_config is that of mxtensor, and no tensor is quantized: the model stays in high "
    "precision. Remove it from config.json, and to quantize the model pass "
    "quantization_config=mx.TransformersConfig(format)",
    "{value}: its file has no metadata that says its format: another program has written the file without it; make the "
    "checkpoint again",
    "{value}: the metadata of the checkpoint does not say its format",
    "TransformersConfig: {value} trains, and stores no codes; pass a format for inference",
    # of the command, which prints them as one line: tests/cli
    "{value} and {value} have no tensor of the same name: {value} and {value}; compare two checkpoints of one model",
    "{value} trains, and stores no codes; pass a format such as mxfp8-weight-only",
    "the layout {value} can only be read; choose one of {value}",
    "{value} is not a device; pass cpu or cuda",
    "{value} is not a whole number of at least {value}",
    "--device {value}: torch finds no CUDA device here",
    "{value} has no tokenizer; pass --tokenizer with a folder that has one",
    "this command needs transformers: pip install 'mxtensor[cli]'",
    "{value} is not a text in UTF-8: {value}",
    "{value} has no config.json; pass the folder of a model as transformers saves it",
    "{value} is quantized already; leave --format out, or pass the model before quantization",
    "{value} cannot be loaded by transformers: {value}",
    "{value} is not a device of this command; pass cpu or cuda",
    "{value} is not a number above 0",
    "{value} is quantized already; pass the model before quantization",
    "no layer is quantized in {value}; pass the quantized model, and the model before quantization as --reference, or "
    "pass --format",
    "--inputs {value}: the model cannot be called with its tensors, such as {value}: {value}",
    "--tokenizer: {value} does not exist; pass the folder of a tokenizer or of a model",
    "--bits {value}: the smallest of the formats has {value} bits per value; pass more",
    "--text: {value} {value}; pass a text file in UTF-8",
    "the tokenizer in {value} cannot be loaded by transformers: {value}",
    "{value} lacks {value} tensors of {value}, such as {value}: transformers would fill them with random values",
    "{value} cannot be run: {value}; pass the model as a folder that transformers saved",
    "{value} has no tensor in a format of this package, so that no layer is quantized once it is decoded; compare the "
    "models by `mxtensor eval --reference`, or pass --format",
    "{value} has no quantized matrix; pass --format with the format to quantize it to",
    # of reports, which the command prints as one line: tests/cli, tests/report/test_output_errors.py
    "the reference has no layer {value} of its own; pass a copy.deepcopy of the model before",
    "output_errors: inputs is {value}; pass a list of dicts, such as [inputs] for one",
    "output_errors: inputs has {value}; pass the keyword arguments of each call as a dict, such as {'input_ids': ids}",
    "no layer is quantized, so there is nothing to report; pass --format",
    "a report needs matplotlib: pip install 'mxtensor[plot]'",
    "{value} is not a path; is a variable of the shell empty?",
    "--plan: {value} {value}; pass a file that `mxtensor plan` has written",
    "the tokenizer of {value} makes token {value} of the text, and the model knows {value} tokens; pass --tokenizer "
    "with that of the model",
    "the text has {value} tokens, and at least 2 are needed: pass a longer text",
    "the text has {value} tokens; {value} were asked for: pass a longer text, or count={value}",
    "{value} tokens of the text are less than a window of {value}: pass more, or window={value}",
    "the model has a vocabulary of {value} tokens, the reference one of {value}; compare a model with its own "
    "high-precision version",
    # of graphs that torch does not compile: tests/integrations/test_decoding_steps.py
    "compile_decoding: {value} has as many graphs as torch.compile allows; steps of more batch sizes and sizes of the "
    "cache stay eager. Give all calls of generate one max_cache_len, or raise the limit ({value})",
    "compile_decoding: torch cannot compile a step of {value}; its steps stay eager ({value})",
    # a table of configs that another version has written: tests/kernels/small_m/test_heuristics.py
    "a row of a table of launch configs has the columns {value}, not {value}; "
    "measure the table again with python -m mxtensor.report.tune",
}


@pytest.fixture
def names():
    """What the page sets up, and the helpers."""
    return namespace()


def state(names):
    """Every tensor of the namespace, and each model's parameters by identity."""
    tensors = [values_of(v) for v in names.values() if isinstance(v, torch.Tensor)]
    plain = [t for v in tensors for t in (components_of(v) if isinstance(v, mx.MXTensor) else [v.clone()])]
    components = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in plain]
    modules = [v for v in names.values() if isinstance(v, torch.nn.Module)]
    return [t.clone() for t in components], [id(p) for module in modules for p in module.parameters()]


# ---------------------------------------------------------------------------------------------- each row


def test_the_page_has_its_rows():
    assert len(ROWS) == len(set(call for call, *_ in ROWS)) == PAGE.count("\n| `") >= 40


@pytest.mark.exhaustive(quick=130)
@pytest.mark.parametrize(("call", "kind", "message"), [row[:3] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_call_raises_exactly_this_and_changes_nothing(call, kind, message, names):
    expected = {k.__name__: k for k in KINDS}[kind]
    before = state(names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(expected) as error:
            eval(call, names)
    assert type(error.value) is expected
    assert re.fullmatch(pattern(message), str(error.value), re.DOTALL), str(error.value)
    after = state(names)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    assert not (ROOT / "errors.png").exists()


# ---------------------------------------------------------------------------------------------- nothing is missing


def raised():
    """(file:line, message) of every raise and warning of the package, values as {value}."""
    for path in sorted((ROOT / "mxtensor").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            is_warning = isinstance(call, ast.Call) and ast.unparse(call.func) in ("warn", "warnings.warn")
            if is_warning and ast.unparse(call.args[0]) == "message":
                continue  # it is that of the caller
            if isinstance(call, ast.Call) and (isinstance(node, ast.Raise) or is_warning):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text_of(call.args[0])


def text_of(node):
    if isinstance(node, ast.Constant):
        return node.value
    assert isinstance(node, ast.JoinedStr), ast.unparse(node)
    return "".join(v.value if isinstance(v, ast.Constant) else "{value}" for v in node.values)


def test_every_raise_of_the_package_has_a_row():
    messages = [re.sub(r"\{\w+\}", "VALUE", message) for _, _, message, _ in ROWS]
    found = [(place, text) for place, text in raised() if text not in NEVER_SEEN | INNER]
    at_tensor = r"(.+?, tensor .+?: |VALUE: )?"  # what mx.checkpoints adds
    missing = [f"{place}: {text}" for place, text in found
               if not any(re.fullmatch(at_tensor + pattern(text), m) for m in messages)]  # fmt: skip
    assert len(found) >= 30 and missing == []


def test_every_message_ends_with_a_way_out():
    assert all(way_out.strip(" -") for *_, way_out in ROWS)


# ---------------------------------------------------------------------------------------------- beyond one line


def test_a_failing_write_changes_nothing():
    w = mx.quantize(torch.randn(64, 128), "mxfp8", orientation="both")
    before = [t.clone() for t in components_of(w)]
    for bad in (torch.randn(64, 96), torch.randn(63, 128), torch.randn(2, 64, 128), torch.randn(64, 128) * 1j):
        with pytest.raises((RuntimeError, TypeError)):
            w.copy_(bad)
    assert all(torch.equal(a, b) for a, b in zip(components_of(w), before, strict=True))


def test_an_error_inside_a_forced_block_ends_the_force():
    w, x = mx.quantize(torch.randn(64, 128), "mxfp8"), torch.randn(5, 128)
    with pytest.raises(NotImplementedError):
        forced("dequant", lambda: x @ w.t())
    assert (x @ w.t()).shape == (5, 64)
