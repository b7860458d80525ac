"""The cache of compiled code: only this user's own, whole files are found; everything else is built again."""

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mxtensor.kernels.runtime import disk_cache, native_build

FLAGS = ("-O0", "-shared", "-fPIC")
RUNTIME = Path(native_build.__file__).parent
needs_compiler = pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def home(own_cache, monkeypatch, tmp_path):
    """The parent of the cache folder, which does not exist yet."""
    monkeypatch.setattr(disk_cache, "warn_once", disk_cache.warn_once.__wrapped__)  # in each test anew
    (tmp_path / "process").mkdir(mode=0o700)
    monkeypatch.setattr(disk_cache, "_of_this_process", lambda: SimpleNamespace(name=str(tmp_path / "process")))
    return own_cache


@pytest.fixture
def source(home, tmp_path):
    path = tmp_path / "number.cpp"
    path.write_text('extern "C" int number() { return 7; }\n')
    return path


def stored(content=b"code"):
    return disk_cache.store("test", "key", "bin", lambda path: path.write_bytes(content))


def found():
    entry = disk_cache.find("test", "key", "bin")
    return None if entry is None else entry[1]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def in_folder_of_the_user(path, home):
    return path.parent == home / "mxtensor"


def test_contents_are_the_files_of_the_folder(home):
    assert disk_cache.contents() == (home / "mxtensor", [])
    path = stored()
    assert disk_cache.contents() == (home / "mxtensor", [path])


# ---------------------------------------------------------------------------------------------- whom to trust


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_this_user_can_read_and_write_what_is_created(home, umask):
    before = os.umask(umask)
    try:
        path = stored()
    finally:
        os.umask(before)
    assert in_folder_of_the_user(path, home) and found() == b"code"
    assert [mode(p) for p in (home, home / "mxtensor", path)] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777, 0o1777, 0o720])
def test_a_folder_that_others_can_write_is_not_used(home, bits, logged):
    path = stored()
    path.parent.chmod(bits)
    assert found() is None
    other = stored(b"new")
    assert not in_folder_of_the_user(other, home) and mode(other.parent) == 0o700 and found() == b"new"
    assert path.read_bytes() == b"code"
    assert f"not cached in {path.parent}: other users can write it (mode {bits:04o})" in logged.text


@pytest.mark.parametrize("bits", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_loaded(home, bits, logged):
    path = stored()
    path.chmod(bits)
    assert found() is None and f"{path} is not loaded: other users can write it" in logged.text
    assert stored() == path and found() == b"code" and mode(path) == 0o600


def test_a_folder_or_a_file_of_another_user_is_not_used(home, monkeypatch, logged):
    path = stored()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert disk_cache._content(path) is None and "it belongs to user" in logged.text
    assert "it belongs to user" in disk_cache._why_not_folder(path.parent)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "file", "link to the folder", "link to the file"])
def test_what_was_given_to_another_user_is_not_used(home, what, tmp_path):
    path = stored()
    if what == "folder":
        os.chown(path.parent, 12345, 12345)
    elif what == "file":
        os.chown(path, 12345, 12345)
    elif what == "link to the folder":
        path.parent.rename(tmp_path / "real")
        path.parent.symlink_to(tmp_path / "real")
        os.chown(path.parent, 12345, 12345, follow_symlinks=False)
    else:
        path.rename(tmp_path / "real")
        path.symlink_to(tmp_path / "real")
    assert found() is None
    stored(b"new")
    assert found() == b"new"


def test_a_link_of_this_user_to_a_folder_of_this_user_is_followed(home, tmp_path):
    (tmp_path / "disk").mkdir(mode=0o700)
    home.mkdir()
    (home / "mxtensor").symlink_to(tmp_path / "disk")
    assert stored().parent == home / "mxtensor" and len(list((tmp_path / "disk").iterdir())) == 1 and found() == b"code"
    (tmp_path / "disk").chmod(0o777)
    assert found() is None


@pytest.mark.parametrize(("bits", "safe"), [(0o777, False), (0o1777, True), (0o755, True), (0o775, True)])
def test_a_folder_that_everybody_can_rename_is_not_used(home, bits, safe):
    home.mkdir()
    home.chmod(bits)
    assert in_folder_of_the_user(stored(), home) == safe


@pytest.mark.parametrize("place", ["a file", "relative", "a link to nowhere"])
def test_a_place_that_is_not_a_folder_of_the_user_is_replaced(home, place, monkeypatch, tmp_path):
    if place == "a file":
        home.write_text("")
    elif place == "a link to nowhere":
        home.mkdir()
        (home / "mxtensor").symlink_to(tmp_path / "nowhere")
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
        monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    path = stored()
    assert not in_folder_of_the_user(path, home) and found() == b"code"


def test_a_user_without_a_home_has_a_temporary_cache(home, monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert found() is None
    path = stored()
    assert found() == b"code" and mode(path.parent) == 0o700 and not in_folder_of_the_user(path, home)


def test_a_machine_without_a_folder_gets_a_sentence(source, home, monkeypatch):
    home.write_text("")
    monkeypatch.setattr(disk_cache, "_of_this_process", lambda: SimpleNamespace(name="/nonexistent/folder"))
    assert native_build.load(source, FLAGS).startswith("number.cpp did not build: no folder for compiled kernels")
    assert found() is None


def test_a_warning_is_logged_once(logged):
    for _ in range(3):
        disk_cache.warn_once("a sentence of this test")
    assert len(logged.records) == 1 and logged.records[0].levelno == logging.WARNING


# ---------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("size", [0, 1, 3, 5])
def test_a_file_that_was_cut_short_or_changed_is_removed(home, size, logged):
    path = stored()
    path.write_bytes(b"codes"[:size])
    assert found() is None and not path.exists() and f"{path} is damaged ({size} bytes)" in logged.text
    assert stored() == path and found() == b"code"


@needs_compiler
@pytest.mark.parametrize("left", [0, 64, 4096, -8])
def test_a_library_that_was_cut_short_is_built_again(source, left, logged, home):
    assert native_build.load(source, FLAGS, symbols=("number",)).number() == 7
    (path,) = home.rglob("*.so")
    content = path.read_bytes()
    path.unlink()  # the loaded one stays as it is
    path.write_bytes(content[:left])
    path.chmod(0o600)
    assert native_build.load(source, FLAGS, symbols=("number",)).number() == 7
    assert "is damaged" in logged.text and path.read_bytes() == content


@needs_compiler
def test_a_library_without_the_functions_is_built_again_or_a_sentence(source, home, tmp_path, logged):
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    native_build.load(empty, FLAGS)
    (other,) = home.rglob("*.so")
    assert native_build.load(source, FLAGS).number() == 7
    (path,) = set(home.rglob("*.so")) - {other}
    wrong = path.with_name(f"{path.stem.rpartition('-')[0]}-{other.stem.rpartition('-')[2]}.so")
    path.unlink()
    other.rename(wrong)  # whole, private, and without the function
    assert native_build.load(source, FLAGS, symbols=("number",)).number() == 7
    assert f"{wrong} lacks number: it is built again" in logged.text and not wrong.exists()
    sentence = native_build.load(source, FLAGS, symbols=("number", "letter"))
    assert sentence.startswith("number.cpp did not build: ") and sentence.endswith("lacks letter")


@needs_compiler
def test_a_planted_library_is_not_loaded(source, home, monkeypatch, logged):
    """The library of another user, in a folder that is everybody's, for the same source and flags."""
    planted = source.with_name("planted.cpp")
    planted.write_text('extern "C" int number() { return 666; }\n')
    key_of = disk_cache._stem
    monkeypatch.setattr(disk_cache, "_stem", lambda kind, key: "native-same")
    assert native_build.load(planted, FLAGS).number() == 666
    assert native_build.load(source, FLAGS).number() == 666  # the name is all that says what a file is
    (home / "mxtensor").chmod(0o1777)
    assert native_build.load(source, FLAGS).number() == 7
    assert "other users can write it (mode 1777)" in logged.text and key_of("a", "b") != key_of("a", "c")


# ---------------------------------------------------------------------------------------------- builds


def test_folders_of_killed_builds_are_removed_when_they_are_old(home):
    folder = stored().parent
    old, new = time.time() - 2 * disk_cache.OLD, time.time()
    for name, at in (("build-a", old), ("tmpabc_1234", old), ("build-b", new), ("tmpabc_5678", new), ("mine", old)):
        (folder / name).mkdir()
        (folder / name / "half.so").write_bytes(b"half")
        os.utime(folder / name, (at, at))
    (folder / "target").mkdir()
    (folder / "build-link").symlink_to(folder / "target")
    os.utime(folder / "build-link", (old, old), follow_symlinks=False)
    (folder / "build-file").write_bytes(b"")
    os.utime(folder / "build-file", (old, old))
    stored(b"other")
    left = {path.name for path in folder.iterdir() if not path.suffix}
    assert left == {"build-b", "tmpabc_5678", "mine", "target", "build-link", "build-file"}


@needs_compiler
@pytest.mark.parametrize("command", ["{cxx} -m64", "ccache {cxx}", "'{cxx}'", "  {cxx}  "])
def test_the_compiler_is_a_command_of_several_words(source, command, monkeypatch, tmp_path, home):
    (cxx,) = native_build.compiler()
    if "-m64" in command and os.uname().machine != "x86_64":
        command = "{cxx} -O1"
    runs = tmp_path / "runs"
    (tmp_path / "ccache").write_text(f'#!/bin/sh\necho "$@" >> {runs}\nexec "$@"\n')
    (tmp_path / "ccache").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CXX", command.format(cxx=cxx))
    assert native_build.load(source, FLAGS, symbols=("number",)).number() == 7
    assert runs.exists() == ("ccache" in command)
    assert in_folder_of_the_user(next(home.rglob("*.so")), home)


@pytest.mark.parametrize("command", ["'g++", "/nonexistent/c++ -m64", "false"])
def test_a_compiler_that_cannot_run_is_a_sentence(source, command, monkeypatch, home):
    monkeypatch.setenv("CXX", command)
    assert native_build.load(source, FLAGS).startswith("number.cpp did not build: ")
    assert not list(home.rglob("*.so")) and not list(home.rglob("build-*"))


PROCESS = """
import sys, types
from pathlib import Path
package = types.ModuleType("runtime")
package.__path__ = [sys.argv[1]]
sys.modules["runtime"] = package
from runtime.native_build import load
library = load(Path(sys.argv[2]), {flags!r}, symbols=("number",))
assert not isinstance(library, str), library
print(library.number())
"""


@needs_compiler
def test_processes_that_build_at_once_all_get_the_library(source, home):
    home.mkdir()
    for _ in range(2):  # nothing is cached, then a damaged file
        command = [sys.executable, "-c", PROCESS.format(flags=FLAGS), str(RUNTIME), str(source)]
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
        ]
        results = [process.communicate() for process in running]
        assert [out.strip() for out, _ in results] == ["7"] * 4, results
        (path,) = home.rglob("*.so")
        assert disk_cache._content(path) is not None and not list(home.rglob("build-*"))
        path.write_bytes(path.read_bytes()[:4096])
