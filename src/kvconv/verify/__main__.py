"""The process behind `Verifier.compare`: runs the checks and prints the result as JSON."""

import dataclasses
import json
import sys
from pathlib import Path

from kvconv.errors import KvconvError
from kvconv.manifest import check_files
from kvconv.runtime import Bundle, Session
from kvconv.verify.checks import run_checks
from kvconv.verify.reference import Reference


def main(folder: Path, threads: int | None) -> None:
    """Verify a bundle against the stored reference on standard input."""
    bundle = Bundle.open(folder)
    check_files(folder, bundle.manifest, hash_all=True)
    session = Session(bundle, threads=threads)
    with open(sys.stdin.fileno(), "rb", closefd=False) as file:  # a file that can seek
        reference = Reference.load(file)
    result = run_checks(session, bundle.manifest, reference)
    sys.stdout.write(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None)
    except KvconvError as error:
        sys.exit(str(error))
