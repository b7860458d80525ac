"""C++ sources that are built once and cached on disk, and the sentences for sources that cannot be built."""

import os

import pytest

from mxtensor.kernels.runtime import native_build

FLAGS = ("-O0", "-shared", "-fPIC")
needs_compiler = pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def source(own_cache, tmp_path):
    (tmp_path / "number.h").write_text("#define NUMBER 7\n")
    path = tmp_path / "number.cpp"
    path.write_text('#include "number.h"\nextern "C" int number() { return NUMBER; }\n')
    return path


def built(folder):
    return sorted((folder / "cache").rglob("*.so"))


@needs_compiler
def test_a_source_is_built_once_until_its_text_headers_or_flags_change(source):
    header, files = source.with_name("number.h"), []
    for _ in range(2):
        assert native_build.load(source, FLAGS, (header,)).number() == 7
        (file,) = built(source.parent)
        files.append((file, file.stat().st_ino, file.stat().st_mtime_ns))
    assert files[0] == files[1]
    header.write_text("#define NUMBER 8\n")
    assert native_build.load(source, FLAGS, (header,)).number() == 8
    assert native_build.load(source, (*FLAGS, "-g"), (header,)).number() == 8
    assert len(built(source.parent)) == 3


@needs_compiler
def test_a_source_that_does_not_compile_is_a_sentence_and_leaves_no_file(source):
    source.write_text("no C++\n")
    assert native_build.load(source, FLAGS).startswith("number.cpp did not build: ")
    assert not built(source.parent)


def test_a_machine_without_a_compiler_gets_a_sentence(source, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    assert native_build.load(source, FLAGS) == "there is no C++ compiler; install one or name it in CXX"
