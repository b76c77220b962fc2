"""``scu-trainer recipes``: jobs and launch files that come with the package, listed, printed or copied."""

from __future__ import annotations

import shutil
from pathlib import Path

from scu_trainer import shipped
from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser, require_new_file
from scu_trainer.errors import SettingsError

DESCRIPTION = """\
Without a name: all of them, each with a sentence. With a name: that file, for you to read, copy and change. In place
of a path, --config takes the name of a recipe and --deepspeed the name of a file in ds_configs."""


@guarded
def main(argv: list[str]) -> int:
    parser = Parser(prog="scu-trainer recipes", description=DESCRIPTION)
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a file in the list")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--copy", type=Path, metavar="FILE", help="write it there instead, or into that folder")
    way.add_argument("--path", action="store_true", help="print its path instead, for other programs")
    options = parser.parse_args(argv)
    if options.name is None:
        if options.copy is not None or options.path:
            raise SettingsError(
                "--copy and --path need a name: scu-trainer recipes NAME --copy FILE; scu-trainer "
                "recipes lists the names"
            )
        print(_listed())
        return 0
    path = shipped.one(options.name)
    if options.copy is not None:
        print(_copied(path, options.copy))
    else:
        print(path if options.path else path.read_text(encoding="utf-8"), end="\n" if options.path else "")
    return 0


def _listed() -> str:
    blocks = []
    for folder, use in shipped.FOLDERS.items():
        found = shipped.files(folder)
        width = max(map(len, found))
        lines = [f"  {name:<{width}}  {shipped.about(path)}" for name, path in found.items()]
        blocks.append("\n".join([f"{folder} ({use}):", *lines]))
    return "\n\n".join(blocks)


def _copied(path: Path, target: Path) -> Path:
    """Raises SettingsError where a file is there already."""
    target = target / path.name if target.is_dir() else target
    require_new_file(target, "--copy")
    return Path(shutil.copyfile(path, target))
