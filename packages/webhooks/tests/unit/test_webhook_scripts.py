"""Does every script of the outbox have a name?"""

from pathlib import Path

from midstream_webhooks import outbox


def test_every_script_file_is_a_script_or_a_part_of_one() -> None:
    there = {file.stem for file in (Path(outbox.__file__).parent / "lua").glob("*.lua")}
    assert there == {*outbox.SCRIPTS, "hooks_common", "hooks_rotate"}
