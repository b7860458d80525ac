"""The data of facts.yaml, from facts.jsonl: a sentence, the words to choose from, and the number of the right one."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("facts.jsonl")


def rows() -> list[dict[str, Any]]:
    """The lines of the file."""
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def facts(**options: Any) -> dict[str, Any]:
    """The splits, as lm-eval asks for them."""
    from datasets import Dataset  # lm-eval brings it

    return {"test": Dataset.from_list(rows())}
