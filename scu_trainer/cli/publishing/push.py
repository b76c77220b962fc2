"""``scu-trainer push``: pushes a run to the Hub, as adapter or merged, with a card made from the files of the run."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Optional

from scu_trainer.cli.fields import parse_checked
from scu_trainer.cli.main import guarded
from scu_trainer.cli.origin import is_merged_from
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.publishing.merge import add_merge_options, default_output, merge, merge_options
from scu_trainer.cli.subjects import Subject, refuse_name_of_run, subject_of
from scu_trainer.errors import HubError, ModelError, SettingsError
from scu_trainer.figures import count_text
from scu_trainer.hub.card import CARD, base_license
from scu_trainer.hub.facts import RunFacts, facts_of
from scu_trainer.hub.files import Upload, collect_upload, require_shared_base
from scu_trainer.hub.push import push, require_repo_id, require_revision, sent_notes, token_for
from scu_trainer.models.loading.names import nearest_folder_hint
from scu_trainer.run_files import format_bytes
from scu_trainer.secrets import remember

DESCRIPTION = """\
RUN is the folder of a finished run, of one of its checkpoints, or of a model that scu-trainer merge wrote. Push
sends the weights, the tokenizer, a model card and the small files with results as one commit; --dry_run lists them
without contacting the Hub. Checkpoints, logs, optimizer states and locks are not sent."""

WIDTH = 40


def _parser() -> Parser:
    parser = Parser(prog="scu-trainer push", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--repo_id", help="OWNER/NAME on the Hub; created if it does not exist")
    parser.add_argument("--dry_run", action="store_true", help="show every file and byte; no network, no token")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--merged", action="store_true", help="full weights: the adapter merged into its base")
    parser.add_argument("--base_model", metavar="OWNER/NAME", help="the base of an adapter on the Hub")
    parser.add_argument("--revision", help="branch to commit to; created if it does not exist (default: main)")
    parser.add_argument("--commit_message", help="default: what is sent, and from which step")
    parser.add_argument("--token", help="better use `hf auth login` or HF_TOKEN: others can read a command line")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_merge_options(parser.add_argument_group("with --merged, and the license"))
    return parser


@guarded
def main(argv: list[str]) -> int:
    typed = parse_checked(_parser(), argv)
    remember(*filter(None, [typed.token]))
    if typed.repo_id is None:
        raise SettingsError("push needs --repo_id OWNER/NAME, the name on the Hub")
    require_repo_id(typed.repo_id)
    require_revision(typed.revision, "--revision")
    token = None if typed.dry_run else token_for(typed.token)
    facts, upload, license = _prepared_upload(typed)
    if typed.dry_run:
        print(json.dumps(_as_dict(upload, typed)) if typed.json else screen(upload, typed, license))
        return 0
    sent = push(
        upload,
        typed.repo_id,
        token=token,
        private=typed.private,
        revision=typed.revision,
        message=typed.commit_message or _message(facts),
        base_id=(typed.base_model or facts.base_id) if facts.is_adapter else None,
    )
    print(json.dumps(sent) if typed.json else _pushed_screen(sent, upload))
    return 0


def _prepared_upload(typed: argparse.Namespace) -> tuple[RunFacts, Upload, Optional[str]]:
    """Return the facts of the run, what to send, and the license. Raises UserError for a run that is not finished, and
    for a model that nobody could load."""
    path = Path(typed.run).expanduser().resolve()
    refuse_name_of_run(typed.run)
    if not path.is_dir():
        raise ModelError(
            f"{typed.run} is not a folder here{nearest_folder_hint(typed.run)}; give the folder of a run, of a "
            "checkpoint or of a merged model"
        )
    subject = subject_of(typed.run)
    facts, merged = facts_of(path)
    if typed.base_model is not None:
        require_repo_id(typed.base_model)
    if typed.merged and merged is None:
        merged = _merged_folder(subject, typed)
        facts, merged = facts_of(merged)
    elif merged is not None:
        _require_same_adapter(facts, merged)
    elif facts.is_adapter:
        _require_text_task(facts, typed.run)
        require_shared_base(facts, typed.base_model)
    license = typed.license or base_license(str(merged or facts.weights)) or base_license(facts.base)
    return facts, collect_upload(facts, typed.repo_id, license, typed.base_model, merged), license


def _require_same_adapter(facts: RunFacts, merged: Path) -> None:
    """Raise HubError if the adapter is no longer the merged one, because the card describes the present run."""
    if not is_merged_from(merged, facts.weights):
        raise HubError(
            f"{merged} was made from an adapter that is no longer in {facts.weights}: the adapter was trained "
            f"again, and its scores are not those of the merged weights; merge it again"
        )


def _require_text_task(facts: RunFacts, name: str) -> None:
    if facts.task != "text-generation":
        raise HubError(
            f"{name} is an adapter of task: {facts.task}, and its base has other classes on the Hub; add --merged to "
            "push the full weights"
        )


def _merged_folder(subject: Subject, typed: argparse.Namespace) -> Path:
    """Return the folder with the merged weights of ``subject``: of an earlier merge if it matches, otherwise merged
    now."""
    output, options = default_output(subject), merge_options(typed)
    if not output.exists():
        print(f"merging into {output}", file=sys.stderr)
        merge(subject, output, options)
        return output
    facts, _ = facts_of(output)
    is_same = is_merged_from(output, Path(subject.source))
    if is_same and options.dtype in ("auto", facts.merge["dtype"]):
        print(f"using the existing merge: {output}", file=sys.stderr)
        return output
    content = "of another adapter" if not is_same else f"in {facts.merge['dtype']}"
    raise ModelError(f"{output} already exists and holds a model {content}; remove it, or push that folder")


def _message(facts: RunFacts) -> str:
    step = facts.step or facts.metrics.get("steps")
    content = "adapter" if facts.is_adapter else "merged model" if facts.merge else "model"
    return f"{content} of scu-trainer" + (f", step {step}" if step else "")


# -- output ------------------------------------------------------------------------------------------------------------


def screen(upload: Upload, typed: argparse.Namespace, license: Optional[str]) -> str:
    visibility = "private" if typed.private else "public, unless it exists and is private"
    lines = [f"to {typed.repo_id}, branch {typed.revision or 'main'} ({visibility})", ""]
    lines += [f"  {item.path_in_repo:<{WIDTH}} {item.size_bytes:>15,} bytes" for item in upload.items]
    total = f"{count_text(len(upload.items), 'file')}, {format_bytes(upload.size_bytes)}"
    lines += [f"  {total:<{WIDTH}} {upload.size_bytes:>15,} bytes", ""]
    lines += _left_out_lines(upload)
    lines.append(f"license: {license or 'not stated; --license names one'}")
    if upload.edited:
        lines.append("card: README.md was edited, and is sent as it is")
    return "\n".join([*lines, "nothing was sent and the Hub was not contacted; drop --dry_run to send it"])


def _left_out_lines(upload: Upload) -> list[str]:
    """Return lines on what is not sent, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in upload.left_out:
        reasons.setdefault(reason, []).append(name)
    lines = [f"stays here: {', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return [textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False) for line in lines]


def _as_dict(upload: Upload, typed: argparse.Namespace) -> dict:
    return {
        "repo_id": typed.repo_id,
        "revision": typed.revision or "main",
        "private": typed.private,
        "files": {item.path_in_repo: item.size_bytes for item in upload.items},
        "size_bytes": upload.size_bytes,
        "left_out": dict(upload.left_out),
    }


def _pushed_screen(sent: dict, upload: Upload) -> str:
    files = f"{sent['files']} files ({format_bytes(sent['size_bytes'])})"
    line = f"pushed {files} as one commit" if sent["is_changed"] else f"unchanged: the Hub has all {files} already"
    notes = ["card: README.md was edited, and was sent as it is"] if upload.edited else []
    notes += [f"stays here: {name} ({reason})" for name, reason in upload.left_out if name == CARD]
    return "\n".join([line, *notes, *sent_notes(sent), sent["url"]])
