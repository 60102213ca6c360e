"""Conversations in ``swarm quickstart`` and ``swarm eval``: a model's template writes them, answers count."""

from __future__ import annotations

import io
import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from data_shards.documents import Packing, rows_of
from data_shards.draft import Documents
from data_shards.packing import counted_between
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer
from peers.checkpoints.choose_checkpoint import ChosenStep
from peers.cli.app import run as swarm
from peers.commands import evaluate
from peers.commands.evaluate import Loaded, held_out_loss, load_checkpoint, sliding, text_loss
from peers.commands.quickstart import QuickstartOptions, plan_run
from peers.data.building import encoded_documents
from peers.data.flaws import LeftOut
from peers.data.keys import KeyCount
from peers.data.prepare import PreparedRun, prepare_run
from peers.data.tokenizer_files import run_encoding
from peers.data.trainer_data import check_ids_fit
from peers.exit_codes import EXIT_OK, EXIT_USAGE
from peers.home.run_directory import RunDirectory
from peers.options.foundation import Foundation
from peers.options.local import LocalOptions
from swarm.config import parse_manifest
from swarm.errors import ConfigError
from swarm.models.packing import packed_positions
from tests.harness.rigs.chat import CHATML, END, chat_tokenizer
from tests.harness.rigs.foreign import foreign_config
from tests.harness.rigs.peers import kept_run, printed

pytestmark = pytest.mark.usefixtures("encoded_here")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
NUMBERS = range(200)


def said(number: int) -> list[dict[str, str]]:
    """Return a conversation with two answers."""
    return [
        {"role": "user", "content": f"what is two plus {number}?"},
        {"role": "assistant", "content": f"answer {number + 2}."},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "fine, naïve one"},
    ]


def write_chats(path: Path, *more: Any, numbers: range = NUMBERS) -> Path:
    """Write conversations, and other records behind them."""
    records = [*({"messages": said(number)} for number in numbers), *more]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def plan(root: Path, text: Path, template: str = CHATML, **said: Any) -> QuickstartOptions:
    """What quickstart is to play with a model that speaks like this."""
    model = root / "model"
    if not model.exists():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(foreign_config("llama", vocab_size=512)))
        (model / "tokenizer.json").write_bytes(chat_tokenizer())
        spoken = {"eos_token": END} | ({"chat_template": template} if template else {})
        (model / "tokenizer_config.json").write_text(json.dumps(spoken))
    shape: dict[str, Any] = {"model": str(model), "from_scratch": True, "context": 64, "steps": 3, "rows": 8}
    return plan_run(Foundation(**shape | said), LocalOptions(peers=2, text=(text,), allow_bad=True))


def prepare(options: QuickstartOptions, directory: RunDirectory) -> PreparedRun:
    return prepare_run(options.foundation, options.document, options.text, directory)


def learnt(path: Path) -> list[str]:
    """Return what a shard's rows teach of each document."""
    shard, tokenizer = Shard.open(path), Tokenizer(chat_tokenizer(), END)
    assert shard.counted is not None
    ends = [*shard.starts.tolist()[1:], shard.manifest.tokens]
    texts = []
    for begin, end in zip(shard.starts.tolist(), ends, strict=True):
        kept = np.asarray(shard.tokens[begin:end])[counted_between(shard.counted, begin, end)]
        texts.append(tokenizer.decode_all(kept.tolist()))
    return texts


# --- quickstart -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["stream", "documents"])
def prepared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDirectory, PreparedRun]:
    """A run that was prepared from conversations, one of them twice and one without an answer, and a text."""
    root = tmp_path_factory.mktemp("chats")
    more = {"messages": said(0), "id": 0}, {"messages": said(0)[:1]}, {"text": "plain words"}
    text = write_chats(root / "chats.jsonl", *more)
    directory = RunDirectory(root / "run")
    return directory, prepare(plan(root, text, packing=request.param), directory)


def test_every_conversation_is_learnt_once_by_one_trainer_or_held_out(
    prepared: tuple[RunDirectory, PreparedRun],
) -> None:
    directory, run = prepared
    paths = [directory.shard(0), directory.shard(1), directory.held_out]
    each = [learnt(path) for path in paths]
    expected = [f"answer {number + 2}.{END}fine, naïve one{END}" for number in NUMBERS]
    assert sorted(sum(each, [])) == sorted([*expected, f"plain words{END}"])
    assert all(len(texts) > 5 for texts in each)
    assert all(one.template is not None for one in (*run.shards, run.held_out))
    assert run.manifest.tokenizer.template == CHATML
    found = [rows_of(Shard.open(path), run.manifest.model.context, run.manifest.batch.packing).count for path in paths]
    assert list(run.rows) == found[:2]


def test_what_cannot_be_learnt_is_named_where_it_lies(prepared: tuple[RunDirectory, PreparedRun]) -> None:
    directory, run = prepared
    place = f"{directory.root.parent / 'chats.jsonl'}:{len(NUMBERS) + 2}"
    left_out = "; 1 of 203 records (67 of 43,094 bytes) left out"
    assert run.left_out == (
        f"{left_out}: {place}: it has no answer of the assistant to learn from; key id: 1 record: not used"
    )


def test_held_out_loss_is_of_answers_in_rows_as_the_run_packs_them(prepared: tuple[RunDirectory, PreparedRun]) -> None:
    directory, run = prepared
    manifest, packings = run.manifest, set()
    rows = rows_of(Shard.open(directory.held_out), manifest.model.context, manifest.batch.packing)

    class Model:
        def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
            packings.add(packed_positions() is not None)
            assert tokens.shape == targets.shape
            counted = int((targets >= 0).sum())
            seen.append(counted)
            return 2.0 * counted, counted

    seen: list[int] = []
    judged = Loaded(Model(), Tokenizer(chat_tokenizer(), END), torch.device("cpu"))  # type: ignore[arg-type]
    chosen = cast(ChosenStep, SimpleNamespace(manifest=manifest, step=0))
    assert held_out_loss(judged, chosen, directory.held_out) == 2.0
    assert sum(seen) == rows.targets < rows.count * manifest.model.context
    assert packings == {manifest.batch.packing == "documents"}


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_too_few_conversations_say_how_many_rows_there_are(tmp_path: Path, packing: Packing) -> None:
    text = write_chats(tmp_path / "chats.jsonl", numbers=range(3))
    with pytest.raises(ConfigError, match=r"with something to learn for each of 2 trainers.*1 held out; this has \d+"):
        prepare(plan(tmp_path, text, packing=packing), RunDirectory(tmp_path / "run"))


def test_tokens_that_the_model_has_no_row_for_are_refused(prepared: tuple[RunDirectory, PreparedRun]) -> None:
    directory, run = prepared
    shard = Shard.open(directory.shard(0))
    largest = int(np.asarray(shard.tokens).max())
    for rows, refused in ((largest + 1, False), (largest, True)):
        model = run.manifest.model.model_copy(update={"vocab_size": rows})
        manifest = run.manifest.model_copy(update={"model": model})
        with pytest.raises(ConfigError, match=f"below {rows}, .*this has {largest}") if refused else nullcontext():
            check_ids_fit(shard, manifest, "--text", "chats")


def test_conversations_of_which_none_can_be_used_say_why(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": said(0)[:1]}))
    with pytest.raises(ConfigError, match=r"chats\.jsonl:1: it has no answer of the assistant"):
        prepare(plan(tmp_path, tmp_path / "chats.jsonl"), RunDirectory(tmp_path / "run"))


def test_conversations_without_a_template_are_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats, out = write_chats(tmp_path / "chats.jsonl"), tmp_path / "run"
    quickstart = ["quickstart", "--text", str(chats), "--out", str(out), "--steps", "3"]
    assert swarm(quickstart) == EXIT_USAGE
    assert f"--text = '{chats}:1' cannot be used: it is a conversation" in capsys.readouterr().err
    chats.write_text('{"prompt": "two plus two?", "completion": " four"}')
    assert swarm(quickstart) == EXIT_USAGE
    assert "of which the completion alone is learnt" in capsys.readouterr().err
    assert not out.exists()


# --- eval -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``run``, whose manifest has a template, and ``model``, exported from it."""
    root, kept = tmp_path_factory.mktemp("spoken"), kept_run()
    document = kept.manifest.model_dump(mode="json")
    document["tokenizer"] |= {"template": TEMPLATE, "tokens": {"eos_token": "<|endoftext|>"}}
    kept.manifest = parse_manifest(document, "the test")
    kept.keep(root / "run", 10)
    assert swarm(["export", "--out", str(root / "model"), "--run", str(root / "run")]) == 0
    return root


def test_eval_of_run_and_exported_model_count_answers_alone(
    spoken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"messages": said(0)[:1]}, {"messages": said(4), "system": "be kind", "id": 4}
    chats = write_chats(tmp_path / "chats.jsonl", *more, numbers=range(4))
    (tmp_path / "plain.txt").write_text("Some words.<|endoftext|>")
    found = []
    for source in (["--run", str(spoken / "run")], ["--model", str(spoken / "model")]):
        assert swarm(["eval", *source, str(chats), "--json"]) == EXIT_USAGE
        assert "1 of 6 records" in capsys.readouterr().err
        assert swarm(["eval", *source, str(chats), "--json", "--allow-bad"]) == EXIT_OK
        found.append(printed(capsys))
    answers = sum(len(one["content"].encode()) for number in range(5) for one in said(number)[1::2])
    for one in found:
        assert (one["counted"], one["bytes"], one["files"][0]["counted"]) == ("answers", answers, "answers")
        assert one["keys"] == {"unused": {"id": 1}, "refused": {}, "special": 0, "more": 0}
        assert one["bits_per_byte"] == pytest.approx(one["loss"] * one["tokens"] / math.log(2) / answers)
    for key in ("loss", "perplexity", "bits_per_byte", "tokens"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-5)
    assert swarm(["eval", "--run", str(spoken / "run"), str(tmp_path), "--allow-bad"]) == EXIT_OK
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("answers and text")
    place = f"{chats}:5: it has no answer of the assistant to learn from"
    assert last.endswith(
        f"; 1 of 7 records (67 of 1,175 bytes) left out: {place}; "
        "key id: 1 record: not used; "
        "text of special tokens: 1 place: taken as ordinary characters; --special-tokens takes them as tokens"
    )
    (tmp_path / "told.csv").write_text("said,told\n1,Some words.<|endoftext|>\n")
    told = ["eval", "--run", str(spoken / "run"), str(tmp_path / "told.csv"), "--field", "told", "--json"]
    tokens = []
    for options in ([], ["--special-tokens"]):
        assert swarm([*told, *options]) == EXIT_OK
        found = [printed(capsys)]
        tokens.append((found[0]["tokens"], found[0]["keys"]["special"]))
    assert [special for _, special in tokens] == [1, 0]
    assert tokens[1][0] < tokens[0][0], "one token, where there were as many as characters"


@torch.no_grad()
@pytest.mark.parametrize("stride", [16, 5])
def test_answer_loss_is_that_of_each_counted_token_after_those_before_it(
    spoken: Path, tmp_path: Path, stride: int
) -> None:
    chats, context = write_chats(tmp_path / "chats.jsonl", {"text": "plain words"}, numbers=range(3)), 16
    loaded = load_checkpoint(RunDirectory(spoken / "run"))
    model, tokenizer = loaded.model, loaded.tokenizer
    document = (spoken / "run" / "tokenizer.json").read_bytes()
    encoding = run_encoding(document, loaded.manifest.tokenizer, key="FILE")
    encoded = list(encoded_documents([chats], encoding, LeftOut("FILE"), KeyCount()))
    documents = [Documents.of(one) for some in encoded for one in some.documents.apart()]
    nats, count = 0.0, 0
    for one in documents:
        assert one.counted is not None
        ids, counted = one.tokens.tolist(), one.counted.tolist()
        if all(counted):  # a text, whose end is not foretold
            ids, counted = [tokenizer.end_of_text, *ids[:-1]], [False, *counted[:-1]]
        for target in filter(counted.__getitem__, range(1, len(ids))):
            window = next(one for one in sliding(len(ids) - 1, context, stride) if target - 1 < one.stop)
            scores = model.logits(model(torch.tensor(ids)[None, window.start : target]))[0, -1]
            nats -= scores.log_softmax(-1)[ids[target]].item()
            count += 1
    found = text_loss(loaded, encoded, context=context, stride=stride)
    assert (found.tokens, found.nats) == (count, pytest.approx(nats, rel=1e-6))
    assert count == sum(int(one.counted.sum()) for one in documents if one.counted is not None) - 1


@pytest.mark.parametrize("source", ["run", "model", "lacking"])
def test_eval_of_conversations_without_a_template_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", numbers=range(2))
    directory = kept_run().keep(tmp_path / "run", 10)
    arguments = ["--run", str(directory.root)]
    if source != "run":
        assert swarm(["export", "--out", str(tmp_path / "model"), *arguments]) == 0
        arguments = ["--model", str(tmp_path / "model")]
    if source == "lacking":
        (tmp_path / "model" / "tokenizer.json").unlink()
    assert swarm(["eval", *arguments, str(chats)]) == EXIT_USAGE
    cause = (
        "a directory with a tokenizer.json, or another"
        if source == "lacking"
        else "nothing says how to write it as text"
    )
    err = capsys.readouterr().err
    assert cause in err
    assert "next:" in err


# --- sample -----------------------------------------------------------------------------------------------------------


def test_sample_of_run_and_exported_model_answers_in_the_template_and_remembers_what_was_said(
    spoken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[int]] = []
    answered = evaluate.answer_text
    monkeypatch.setattr(evaluate, "answer_text", lambda *given: asked.append(given[1]) or answered(*given))
    how, found = ["--temperature", "0", "--tokens", "6", "--json"], []
    for source in ([str(spoken / "run")], ["--model", str(spoken / "model")]):
        monkeypatch.setattr("sys.stdin", io.StringIO("Some words\n\nand more<|endoftext|>\n"))
        assert swarm(["sample", *source, "--chat", *how]) == EXIT_OK
        found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
        assert swarm(["sample", *source, "--prompt", "Some words", *how]) == EXIT_OK
        assert printed(capsys)["text"] == found[-1][0]["text"]
        assert swarm(["sample", *source, "--prompt", "Some words", "--raw", *how]) == EXIT_OK
        assert printed(capsys)["text"] != found[-1][0]["text"]
    ours, theirs = ([(one["prompt"], one["text"]) for one in lines] for lines in found)
    assert [question for question, _ in ours] == [question for question, _ in theirs]
    assert [question for question, _ in ours] == ["Some words", "and more<|endoftext|>"]
    tokenizer = kept_run().tokenizer
    texts = [Tokenizer(tokenizer, "<|endoftext|>").decode_all(list(question)) for question in asked[:2]]
    first = "user\nSome words<|endoftext|>assistant\n"
    assert texts[0] == first
    assert texts[1] == f"{first}{ours[0][1]}<|endoftext|>user\nand more<|endoftext|><|endoftext|>assistant\n"
    ends = [list(question).count(Tokenizer(tokenizer, "<|endoftext|>").end_of_text) for question in asked[:2]]
    assert ends == [1, 3], "what a person types is no special token"


def test_chat_says_by_which_seed_it_answers(
    spoken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        monkeypatch.setattr("sys.stdin", io.StringIO("Some words\n"))
        assert swarm(["sample", str(spoken / "run"), "--chat", "--tokens", "8", "--seed", seed]) == EXIT_OK
        said = capsys.readouterr()
        assert f"seed {seed}: the same conversation gets the same answers; for others give --seed N" in said.err
        answers.append(said.out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("more", [["--raw"], ["--prompt", "x"], []])
def test_chat_with_what_does_not_chat_is_refused(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_run().keep(tmp_path / "run", 10)
    assert swarm(["sample", str(tmp_path / "run"), "--chat", *more]) == EXIT_USAGE
    assert ("no option besides --chat" if more else "a model with a chat template") in capsys.readouterr().err
