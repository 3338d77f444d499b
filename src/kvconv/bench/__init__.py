"""Measuring how fast a bundle runs, with the shipped runtime and in the words of llama-bench.

A *run* feeds `context` prompt tokens and takes one new id (the prefill), then `gen` more, one at a
time (the decode). A *point* is the best of several runs. Points of two bundles are comparable only
when their runs take turns on an idle machine (`compare`).
"""

from kvconv.bench.comparison import Ratio, compare
from kvconv.bench.measurement import Measurement
from kvconv.bench.point import Point, to_points
from kvconv.bench.profiling import Profile, profile
from kvconv.bench.sample import Sample

__all__ = ["Measurement", "Point", "Profile", "Ratio", "Sample", "compare", "profile", "to_points"]
