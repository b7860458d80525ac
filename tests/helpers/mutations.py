"""Files of a valid kind with changed bytes, JSON values or pickles, for tests that read many of them."""

import json
import zipfile

WORDS = (
    None, -1, 0, 1, 2, 3, 17, 1 << 31, 1 << 62, 1 << 70, 0.5, "", "U8", "F8_E4M3", "F4", "BF16", "I64", "nvfp4", "../x",
    [], [1 << 40, 1 << 40], [0, 0], [64, 32], {}, {"a": []}, True,
)  # fmt: skip
BYTES = b'0129{}[]",:aU8F\xff\x00'


def flipped(raw, rng, end):
    """``raw`` with up to three bytes of the first ``end`` changed, and sometimes cut."""
    out = bytearray(raw[: rng.choice([len(raw), len(raw), len(raw), end, rng.randrange(len(raw))])])
    for _ in range(rng.randint(0, 3)):
        if out:
            out[rng.randrange(min(end, len(out)))] = rng.choice(BYTES)
    return bytes(out)


def places(tree, path=()):
    """The path of every value in nested dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def replanted(tree, rng):
    """A copy of a JSON tree in which up to two values are others, have another key, or are gone."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 2)):
        found = list(places(tree))
        if not found:
            break
        *path, key = rng.choice(found)
        parent = tree
        for step in path:
            parent = parent[step]
        what = rng.random()
        if what < 0.6:
            parent[key] = json.loads(json.dumps(rng.choice(WORDS)))
        elif what < 0.8 and isinstance(parent, dict):
            parent[rng.choice([f"{key}_scale", "m.weight", "", "x" * 300])] = parent.pop(key)
        else:
            del parent[key]
    return tree


def of_zip(path, raw, rng):
    """A file of ``torch.save`` with another pickle, or with other bytes anywhere."""
    if rng.random() < 0.3:
        return flipped(raw, rng, len(raw))
    out = path.with_suffix(".zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", rng.choice([zipfile.ZIP_STORED] * 9 + [8])) as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                data = bytearray(data)
                for _ in range(rng.randint(1, 3)):
                    at = rng.randrange(len(data))
                    data[at : at + rng.randint(0, 1)] = rng.choice(
                        [b"", bytes([rng.randrange(256)]), b"K\x05", b"(", b"R"]
                    )
            new.writestr(entry.filename, bytes(data))
    return out.read_bytes()
