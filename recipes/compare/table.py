"""Print a Markdown table of what compare.py measured. Usage: python table.py FILE.jsonl ...

Of several lines for one point the fastest counts. Ratios are those of the first kvconv bundle.
"""

import json
import sys
from pathlib import Path
from typing import Any

_BUSY_CORES = 0.1


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print tokens per second, peak memory, and how many times as fast kvconv is.

    Args:
        lines: As compare.py writes them.
    """
    best: dict[tuple[str, str, int], dict[str, Any]] = {}
    for line in lines:
        if line["what"] == "error":
            print(f"{line['peer']} at {line['context']}: {line['error']}")
            continue
        key = (line["peer"], line["what"], line["context"])
        if key not in best or line["tokens_per_s"] > best[key]["tokens_per_s"]:
            best[key] = line
    peers = list(dict.fromkeys(peer for peer, _, _ in best))
    columns = sorted({key[1:] for key in best}, key=lambda key: (key[0] != "prefill", key[1]))
    own = next((peer for peer in peers if peer.startswith("kvconv")), None)
    reference = next((peer for peer in peers if peer == "transformers"), own)
    print("\n| tokens/s (kvconv / peer) [peak MB] | " + " | ".join(f"{w} {c}" for w, c in columns))
    print("|---|" + "---|" * len(columns))
    for peer in peers:
        cells = []
        for column in columns:
            line = best.get((peer, *column))
            ours = best.get((own or "", *column))
            cells.append("" if line is None else _cell(line, None if peer == own else ours))
        print(f"| {peer} | " + " | ".join(cells) + " |")
    print(f"\nFirst new ids that agree with those of {reference}:")
    for peer in peers:
        agreeing = []
        for column in columns:
            ids = [
                best[who, *column]["first_ids"]
                for who in (peer, reference)
                if (who, *column) in best
            ]
            if column[0] == "decode" and len(ids) == 2:
                pairs = list(zip(*ids, strict=False))  # runs of other --gen have fewer or more
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                agreeing.append(f"{column[1]}: {same} of {len(pairs)}")
        print(f"  {peer}: {', '.join(agreeing)}")
    busy = [key for key, line in best.items() if line["other_cores"] > _BUSY_CORES]
    if busy:
        print(
            "\nThe machine was busy with something else (`!`): these points are not to be trusted."
        )


def _cell(line: dict[str, Any], ours: dict[str, Any] | None) -> str:
    ratio = "" if ours is None else f" ({ours['tokens_per_s'] / line['tokens_per_s']:.2f}x)"
    busy = "!" if line["other_cores"] > _BUSY_CORES else ""
    return f"{line['tokens_per_s']:.4g}{busy}{ratio} [{line['peak_rss_mb']:.0f}]"


if __name__ == "__main__":
    print_table(
        [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    )
