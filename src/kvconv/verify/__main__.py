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


def main(folder: Path, reference: Path, threads: int | None) -> None:
    """Verify a bundle against a stored reference."""
    bundle = Bundle.open(folder)
    check_files(folder, bundle.manifest, hash_all=True)
    session = Session(bundle, threads=threads)
    result = run_checks(session, bundle.manifest, Reference.load(reference))
    sys.stdout.write(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
    except KvconvError as error:
        sys.exit(str(error))
