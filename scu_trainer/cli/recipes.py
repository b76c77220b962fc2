"""``scu-trainer recipes``: lists, prints or copies the jobs and launch files that come with the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from scu_trainer import shipped
from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser, require_new_file
from scu_trainer.errors import SettingsError

DESCRIPTION = """\
Without a name, lists all of them, each with a sentence. With a name, prints that file, for you to read, copy and
change. Instead of a path, --config takes the name of a recipe and --deepspeed the name of a file in ds_configs."""


@guarded
def main(argv: list[str]) -> int:
    parser = Parser(prog="scu-trainer recipes", description=DESCRIPTION)
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a file in the list")
    outputs = parser.add_mutually_exclusive_group()
    outputs.add_argument("--copy", type=Path, metavar="FILE", help="write it there instead, or into that folder")
    outputs.add_argument("--path", action="store_true", help="print its path instead, for other programs")
    options = parser.parse_args(argv)
    if options.name is None:
        if options.copy is not None or options.path:
            raise SettingsError(
                "--copy and --path need a name: scu-trainer recipes NAME --copy FILE; scu-trainer "
                "recipes lists the names"
            )
        print(_listing())
        return 0
    path = shipped.one(options.name)
    if options.copy is not None:
        print(_copy_file(path, options.copy))
    else:
        print(path if options.path else path.read_text(encoding="utf-8"), end="\n" if options.path else "")
    return 0


def _listing() -> str:
    blocks = []
    for folder, use in shipped.FOLDERS.items():
        paths = shipped.files(folder)
        width = max(map(len, paths))
        lines = [f"  {name:<{width}}  {shipped.about(path)}" for name, path in paths.items()]
        blocks.append("\n".join([f"{folder} ({use}):", *lines]))
    return "\n\n".join(blocks)


def _copy_file(path: Path, target: Path) -> Path:
    """Copy ``path`` to the file or folder ``target`` and return the new path. Raises SettingsError if it exists."""
    target = target / path.name if target.is_dir() else target
    require_new_file(target, "--copy")
    return Path(shutil.copyfile(path, target))
