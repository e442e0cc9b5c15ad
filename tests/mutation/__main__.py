"""Draws mutants and tests them; see :mod:`tests.mutation`."""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.measure import DATA, ROOT, SECONDS, lines_with_contexts, test_files
from tests.mutation.mutants import Mutant, draw
from tests.mutation.report import markdown
from tests.mutation.runner import Checkout, Verdict, order

QUICK = "not slow and not nightly"


def main() -> None:
    """Tests the mutants that have no verdict yet, and writes the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants to test at once")
    parser.add_argument("--marks", default=QUICK, help="pytest's -m: the tests that are to find the mutants")
    parser.add_argument("--limit-seconds", type=float, default=900, help="for a group of test files")
    parser.add_argument("--only", nargs="*", help="keys of mutants, whose earlier verdicts do not count")
    parser.add_argument("--draw-only", action="store_true", help="print the mutants and test none")
    options = parser.parse_args()
    folder = ROOT / f"build/mutation/seed-{options.seed}-count-{options.count}"
    (folder / "verdicts").mkdir(parents=True, exist_ok=True)
    if not (DATA.exists() and SECONDS.exists()):
        raise SystemExit("no test has been measured yet; run make coverage first")
    lines = lines_with_contexts()
    mutants = _drawn(folder / "mutants.json", lines, options.seed, options.count)
    if options.draw_only:
        print("\n".join(f"{m.key} {m.path}:{m.line}\n  - {m.before.strip()}\n  + {m.after.strip()}" for m in mutants))
        return
    seconds = json.loads(SECONDS.read_text())
    wanted = [m for m in mutants if (m.key in options.only if options.only else not _file(folder, m).exists())]
    with tempfile.TemporaryDirectory(prefix="relay-mutation-") as scratch:
        idle: SimpleQueue[Checkout] = SimpleQueue()
        for number in range(options.jobs):
            checkout = Checkout(ROOT, Path(scratch) / str(number), options.marks)
            checkout.make()
            idle.put(checkout)

        def one(mutant: Mutant) -> None:
            checkout = idle.get()
            try:
                groups = order(lines[mutant.path].get(mutant.line, []), test_files(), seconds)
                verdict = checkout.test(mutant, groups, options.limit_seconds)
            finally:
                idle.put(checkout)
            _file(folder, mutant).write_text(json.dumps(asdict(verdict), indent=1))
            said = f"found by {verdict.by}" if verdict.found else "SURVIVED"
            print(f"{mutant.key} {mutant.path}:{mutant.line} {said} ({verdict.seconds:.0f} s)", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, wanted))
    verdicts = {
        m.key: Verdict(**json.loads(_file(folder, m).read_text())) for m in mutants if _file(folder, m).exists()
    }
    (folder / "report.md").write_text(text := markdown(mutants, verdicts))
    print(f"\n{text}\nwritten to {folder / 'report.md'}")


def _drawn(file: Path, lines: dict[str, dict[int, list[str]]], seed: int, count: int) -> list[Mutant]:
    """The mutants of an earlier run with this seed, or new ones: a draw stands as long as the sources do."""
    if file.exists():
        mutants = [Mutant(**fields) for fields in json.loads(file.read_text())]
        if all((ROOT / m.path).read_text().splitlines()[m.line - 1 : m.line] == [m.before] for m in mutants):
            return mutants
        raise SystemExit(f"the sources have changed since the mutants of {file.parent} were drawn; remove that folder")
    covered = {path: sorted(reached) for path, reached in lines.items() if path.startswith("strategies/")}
    mutants = draw(ROOT, covered, seed=seed, count=count)
    file.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))
    return mutants


def _file(folder: Path, mutant: Mutant) -> Path:
    return folder / "verdicts" / f"{mutant.key}.json"


if __name__ == "__main__":
    main()
