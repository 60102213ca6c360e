"""What a play is measured by: the names of its figures, and what each means."""

from __future__ import annotations

from collections.abc import Mapping

FIGURES: Mapping[str, str] = {
    "faults": "strikes that happened, returns not counted",
    "faults_per_hour": "strikes in the time from the first one to the last closed step, or the end by time, as a rate",
    "throughput_retained": "committed tokens a second since the first strike ÷ (those a second before it × capacity)",
    "throughput_retained_raw": "the same without capacity",
    "capacity": "time-mean, since the first strike, of the smallest number of ready replicas that a stage has ÷ before",
    "baseline_tokens_per_s": "committed tokens a second before the first strike, the first step not counted",
    "tokens_per_s": "committed tokens a second since the last step before the first strike, to the end by time",
    "baseline_steps": "steps measured before the first strike: all but the run's first",
    "participation": "replicas in a step's averaging ÷ those live when it closed, since the first strike",
    "digest_mismatches": "comparisons of replicas' digests that failed (I5)",
    "lost": "microbatches issued whose end nobody knows (I2)",
    "duplicated": "microbatches committed twice (I1)",
    "steps": "the newest step that was closed",
    "seconds": "from the first closed step to the last",
    "max_gap_s": "longest time between two closings, each told by whoever swapped first, or until the end by time",
    "ready_again_s": "longest time from a peer's start to its being ready, after the first step",
    "committed_by_minority": "steps of the history that only peers who were cut off had closed",
    "rewinds": "times that a peer gave up what it had closed without a majority",
    "steps_given_up": "steps that closed without microbatches because a part was lost",
    "relayed": "peers that were reached through others",
    "forced_leaves": "peers that were told to leave and were killed, for their time was up before they had",
    "unexpected_deaths": "peers that ended, or with a code, as no strike explains",
}
