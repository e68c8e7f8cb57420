"""No file gains long sentences, bare relatives, idioms or house words; names are unique."""

import json

from tests.docs import language


def test_no_file_gains_findings():
    recorded = json.loads(language.RECORD.read_text())
    gained = [
        f"{path}: {rule}: {number}, recorded {recorded.get(path, {}).get(rule, 0)}"
        for path, found in language.counts().items()
        for rule, number in found.items()
        if number > recorded.get(path, {}).get(rule, 0)
    ]
    assert not gained, (
        "write these plainer (`python -m tests.docs.language FILE` shows the sentences):\n"
        + "\n".join(gained)
    )


TWINS = {
    "DistributedDataParallel": "c10d's name; parallel.jax has the wrapper of pytrees",
    "GradBucket": "c10d's name: the interface in meshlib, its implementation in parallel",
    "PipelineStage": "torch's name; parallel.jax has the stage that is a function",
    "StageStates": "beside each PipelineStage, the one of its kind",
}


def test_one_class_name_means_one_thing():
    defined = language.class_names()
    allowed = dict.fromkeys(TWINS, 2)
    repeated = {name: where for name, where in defined.items() if len(where) > allowed.get(name, 1)}
    assert not repeated, "give each of these classes a name of its own"
    assert all(len(defined[name]) == 2 for name in TWINS), "TWINS has a name too many"


def test_the_rules_find_what_they_are_for(tmp_path):
    program = tmp_path / "told.py"
    program.write_text(
        '"""The door of a lane."""\n# Who is only cut off was told of as gone.\n'
        f"# Many {'word ' * 31}.\n# Raises TypeError for what is no rank.\n\n\ndef plain():\n"
        '    """Return the rank that only lost its connection."""\n'
    )
    assert [rule for rule, _, _ in language.findings(program)] == [
        "house word",
        "bare relative",
        "long sentence",
        "idiom",
    ]
