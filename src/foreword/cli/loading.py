"""What a person sees while a model loads: a line for each thing that takes long, with its time."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from foreword.assemble import Progress as Tell
from foreword.cli.libraries import import_libraries


@contextmanager
def loading(console: Console, first: str, cache_dir: str | None) -> Generator[Tell]:
    """Show `first`, then what the yielded function is told, each with a spinner until the next one begins.

    On anything but a terminal the lines are printed plainly. The libraries are imported before anything else is done.
    """
    with _telling(console, first) as tell:
        import_libraries(cache_dir)
        yield tell


@contextmanager
def _telling(console: Console, first: str) -> Generator[Tell]:
    if not console.is_terminal:
        console.print(first, highlight=False, soft_wrap=True)
        yield lambda text: console.print(text, highlight=False, soft_wrap=True)
        return
    whole = Column(overflow="fold")  # a long path goes on in the next line
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", table_column=whole),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        lines = _Lines(progress)
        lines.tell(first)
        yield lines.tell
        lines.finish()


class _Lines:
    """One task of a progress display at a time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._current: TaskID | None = None

    def tell(self, text: str) -> None:
        """End the current line and begin the next."""
        self.finish()
        self._current = self._progress.add_task(text, total=1)

    def finish(self) -> None:
        """End the current line."""
        if self._current is not None:
            self._progress.update(self._current, completed=1)
