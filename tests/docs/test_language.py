"""No file gains long sentences, bare relatives or words of a private dialect."""

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


def test_the_rules_find_what_they_are_for(tmp_path):
    program = tmp_path / "told.py"
    program.write_text(
        '"""The door of a lane."""\n# Who is only cut off was told of as gone.\n'
        f"# Many {'word ' * 31}.\n\n\ndef plain():\n"
        '    """Return the rank that only lost its connection."""\n'
    )
    assert [rule for rule, _, _ in language.findings(program)] == [
        "house word",
        "bare relative",
        "long sentence",
    ]
