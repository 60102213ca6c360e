"""The benchmark ``compression-loss`` trains with what it says, and its replicas stay the same."""

from __future__ import annotations

import pytest

from peers.data.text import Corpus
from swarm.models.gpt_config import GptConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.sim.loop import run_world
from tests.benchmarks._compression_team import Codecs, Team
from tests.benchmarks._convergence_replicas import Scale, Text, make_text
from tests.benchmarks.compression_loss import BARS, Compressed, _summary, candidates

SCALE = Scale(
    model=GptConfig(vocab_size=300, dim=64, layers=2, heads=2, context=16),
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1),
    replicas=2,
    rows=2,
    steps=4,
    held_out_rows=3,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    documents = tuple(f"Document {number}: {'word ' * 20}{number * 7919} ends." for number in range(60))
    return make_text(tmp_path_factory.mktemp("text"), Corpus("made up", documents), SCALE, seed=0)


def trained(text: Text, codecs: Codecs) -> tuple[float, int, int]:
    team = Team(SCALE, text, codecs, seed=1)
    before = team.held_out_loss()
    loss = run_world(team.train(2))
    assert loss < 0.95 * before
    return loss, team.boundary_bytes, team.averaging_bytes


def test_codecs_take_the_bytes_that_they_say_and_each_changes_the_loss_a_little(text: Text) -> None:
    dense, boundary, averaging = trained(text, Codecs())
    assert boundary == 4 * 2 * 2 * 3 * 2 * (4 * 2 * 16 * 64), "steps, replicas, microbatches, boundaries, ways"
    for codecs, of_boundary, of_averaging in (
        (Codecs(boundaries="int4h"), 0.53125 / 4, 1.0),
        (Codecs(averaging="int4h"), 1.0, 0.53125 / 4),
    ):
        loss, through, sent = trained(text, codecs)
        assert through == of_boundary * boundary
        assert sent == pytest.approx(of_averaging * averaging, rel=0.01)
        assert loss != dense
        assert loss == pytest.approx(dense, rel=0.05)


def test_feedback_and_a_last_bit_make_other_runs(text: Text) -> None:
    fed, dropped = (trained(text, Codecs(averaging="int4h", feedback=on))[0] for on in (True, False))
    assert fed != dropped
    assert trained(text, Codecs())[0] == trained(text, Codecs())[0]


def test_replicas_apart_average_deltas_as_often_as_it_says_and_4_bits_take_an_eighth(text: Text) -> None:
    dense, boundary, averaging = trained(text, Codecs())
    alone, through, sent = trained(text, Codecs(apart=2))
    assert (through, 2 * sent) == (boundary, averaging)
    assert alone != dense
    rounded, _, few = trained(text, Codecs(apart=2, averaging="int4h"))
    assert few == pytest.approx(0.53125 / 4 * sent, rel=0.01)
    assert rounded != alone
    assert rounded == pytest.approx(alone, rel=0.05)


def test_bars_are_judged_on_candidates_that_there_are() -> None:
    assert BARS.keys() <= candidates().keys()
    runs = {name: [Compressed(loss=2.0, boundary_bytes=4, averaging_bytes=4)] for name in candidates()}
    runs["boundaries int4h"] = [Compressed(loss=2.1, boundary_bytes=1, averaging_bytes=4)]
    found = _summary(runs)
    assert (found["int8h_within"], found["int4h_within"]) == (True, False)
    assert found["above_dense_percent"]["boundaries int4h"] == pytest.approx(5.0)
    assert found["of_dense_bytes"]["boundaries int4h"] == 5 / 8
