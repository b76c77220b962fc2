"""Background runs for people who type no flags: numbers choose, an empty line goes back."""

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
    """``act`` runs a command, given as its words. ``ask`` shows a question and returns the line that was typed;
    EOFError ends the menu."""

    act: Callable[[Sequence[str]], object]
    ask: Callable[[str], str]
    say: Callable[[str], None]
    root: Path
    recipes: Path

    def run(self) -> int:
        """Until somebody quits. What goes wrong is said, and the menu is there again."""
        while True:
            try:
                chosen = self._choose("Background runs", [text for text, _ in ACTIONS])
                name = "quit" if chosen is None else ACTIONS[chosen][1]
                if name == "quit":
                    return 0
                words = self._words(name)
                if words is not None:
                    self.act(words)
            except UserError as error:
                self.say(f"error: {error}")
            except KeyboardInterrupt:
                self.say("")
            except EOFError:
                return 0

    def _words(self, name: str) -> Optional[list[str]]:
        """Of the command; None where nothing was chosen."""
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
        """Index of what was chosen; None for an empty line, or where there is nothing to choose."""
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
