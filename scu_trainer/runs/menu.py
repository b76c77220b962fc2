"""A menu for background runs, for people who do not want to type flags: a number chooses, an empty line goes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from scu_trainer.errors import UserError
from scu_trainer.runs.store import all_runs

ACTIONS = (
    ("start a recipe", "start"),
    ("list all runs", "list"),
    ("look at a run", "monitor"),
    ("read its log", "logs"),
    ("stop a run (it writes a checkpoint)", "stop"),
    ("resume a run", "resume"),
    ("quit", "quit"),
)


@dataclass(frozen=True)
class Menu:
    """The menu and the functions that it calls.

    ``act`` runs a command, given as a list of arguments. ``ask`` shows a prompt and returns the line that was typed;
    EOFError ends the menu. ``say`` prints a line.
    """

    act: Callable[[Sequence[str]], object]
    ask: Callable[[str], str]
    say: Callable[[str], None]
    root: Path
    recipes: Path

    def run(self) -> int:
        """Show the menu until the user quits, then return exit code 0. After an error the menu is shown again."""
        while True:
            try:
                chosen = self._choose("Background runs", [text for text, _ in ACTIONS])
                name = "quit" if chosen is None else ACTIONS[chosen][1]
                if name == "quit":
                    return 0
                words = self._command_words(name)
                if words is not None:
                    self.act(words)
            except UserError as error:
                self.say(f"error: {error}")
            except KeyboardInterrupt:
                self.say("")
            except EOFError:
                return 0

    def _command_words(self, name: str) -> Optional[list[str]]:
        """Return the arguments of the chosen command, or None if nothing was chosen."""
        if name == "list":
            return ["list"]
        if name == "start":
            recipes = sorted(self.recipes.glob("*.yaml"))
            chosen = self._choose(f"Recipes in {self.recipes}", [path.stem for path in recipes])
            return None if chosen is None else ["start", "--config", str(recipes[chosen])]
        runs = [run.name for run in all_runs(self.root)]
        chosen = self._choose(f"Runs in {self.root}", runs)
        return None if chosen is None else [name, runs[chosen]]

    def _choose(self, title: str, texts: Sequence[str]) -> Optional[int]:
        """Return the index of the chosen text, or None for an empty line or if there is nothing to choose."""
        self.say(f"\n{title}")
        if not texts:
            self.say("  there is none")
            return None
        for index, text in enumerate(texts, 1):
            self.say(f"  {index}  {text}")
        while True:
            typed = self.ask("number: ").strip()
            if not typed:
                return None
            if typed.isdigit() and 1 <= int(typed) <= len(texts):
                return int(typed) - 1
            self.say(f"{typed!r} is not a number from 1 to {len(texts)}; an empty line goes back")
