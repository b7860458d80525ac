"""Sentences about files that nobody meant to write: those inside another sentence, and those that a process of its
own shows. Each group names the file of its tests."""

INNER = {
    # of a state of a calibration: tests/calibration/test_state.py
    "calibrate: {value} is damaged: {value}; remove {value}, or pass another folder",
    "a compressed record",
    "a folder or a pipe",
    # of two processes: tests/checkpoints/test_left_behind.py
    "{value} is being written by another process; choose another destination",
    # of a file that becomes shorter: tests/checkpoints/test_read_file.py
    "{value}: the file has changed since it was opened",
    # of odd files: tests/checkpoints/test_odd_files.py
    "{value} is a pipe, a socket or a device; pass a file or a folder",
    "{value}: architectures must be names of classes, got {value}",
    # inside the sentence about a plan: tests/calibration/test_mutations.py
    "{value} needs a format, values, nbytes and errors, got {value}",
    "{value} has values of other types",
    "{value} has sizes or errors that are not numbers, or not finite",
    "{value} has a number of bytes and an error for other formats",
    "{value} has {value} bytes, and a plan has at most {value}; make one by mx.plan",
    "weights is not a dict of names",
    "{value} has the format {value}, which there is not",
    # of a table that mx.tune did not write: tests/calibration/test_mutations.py
    "{value} is not a table of launch configs: {value}",
    # inside the sentence about an extra state: tests/te/test_te_pickle.py
    "opcode {value} is not one of TransformerEngine's pickles",
    "a storage is not of torch.save",
    "a storage holds something else",
    "a storage of {value} values has {value} bytes",
    "a storage has no bytes, or an unknown type",
    "a storage is not bytes",
    "a tensor has no storage, or wrong sizes",
    "a tensor of shape {value} has {value} values",
    "a dict has keys that are not names",
    "it changes a {value}",
}
