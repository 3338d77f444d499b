"""The process behind `Verifier.compare`: runs the checks and prints the result as JSON."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import cast

from kvconv.errors import KvconvError
from kvconv.manifest import Provider, check_files
from kvconv.runtime import Bundle, Session
from kvconv.verify.checks import run_checks
from kvconv.verify.reference import Reference


def main(folder: Path, provider: Provider, threads: int | None) -> None:
    """Verify a bundle against the stored reference on standard input."""
    bundle = Bundle.open(folder)
    check_files(folder, bundle.manifest, hash_all=True)
    session = Session(bundle, provider=provider, threads=threads)
    with open(sys.stdin.fileno(), "rb", closefd=False) as file:  # a file that can seek
        reference = Reference.load(file)
    result = run_checks(session, bundle.manifest, reference)
    sys.stdout.write(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    try:
        folder, provider, *threads = sys.argv[1:]
        main(Path(folder), cast(Provider, provider), int(threads[0]) if threads else None)
    except KvconvError as error:
        sys.exit(str(error))
