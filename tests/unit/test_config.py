"""What holds between sections of the manifest."""

from __future__ import annotations

from typing import Any

import pytest

from swarm import WIRE_VERSION
from swarm.config import parse_manifest
from swarm.errors import ConfigError, Ending, OtherWire
from swarm.membership.rules import late_rules
from swarm.models.hf.hf_config import canonical
from swarm.models.spec import split_layers


def document(**sections: Any) -> dict[str, Any]:
    return {"tokenizer": {"digest": "0" * 64}, **sections}


def test_manifest_with_int8_averaging_is_another_run() -> None:
    plain, rounded = (parse_manifest(document(averaging={"codec": codec}), "a test") for codec in ("float32", "int8"))
    assert rounded.averaging.codec == "int8"
    assert plain.run_id != rounded.run_id


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("run.reproducible", {"run": {"reproducible": True}}),
        ("averaging.mode", {"averaging": {"mode": "local"}}),
        ("averaging.strategy", {"averaging": {"strategy": "grid"}}),
        ("averaging.schedule", {"averaging": {"schedule": "auto"}}),
        ("averaging.codec", {"averaging": {"codec": "int4h"}}),
    ],
)
def test_manifest_with_a_guard_is_another_run_and_refuses_what_it_cannot_guard(
    key: str, sections: dict[str, Any]
) -> None:
    plain, guarded = (parse_manifest(document(averaging=one), "a test") for one in ({}, {"guard": "leave-out"}))
    assert plain.run_id != guarded.run_id
    sections = sections | {"averaging": {**sections.get("averaging", {}), "guard": "leave-out"}}
    with pytest.raises(ConfigError, match="leave averaging.guard out") as caught:
        parse_manifest(document(**sections), "a test")
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("audit", "sections", "key"),
    [
        (0.01, {}, "verify.audit"),
        (0.05, {"averaging": {"mode": "local"}}, "averaging.mode"),
        (0.05, {"averaging": {"strategy": "server"}}, "averaging.strategy"),
        (0.05, {"split": {"routes": "organisation"}, "admission": {"mode": "organisation", "organisation": "ours"}},
         "split.routes"),
        (0.05, {"speed": {"mode": "overlap"}}, "speed.mode"),
    ],
)  # fmt: skip
def test_audits_are_refused_where_nobody_could_judge_and_change_no_run_without_them(
    audit: float, sections: dict[str, Any], key: str
) -> None:
    plain, audited = (parse_manifest(document(verify={"audit": share}), "a test") for share in (0.0, 0.05))
    assert parse_manifest(document(), "a test").run_id == plain.run_id != audited.run_id
    with pytest.raises(ConfigError, match="eave") as caught:
        parse_manifest(document(verify={"audit": audit}, **sections), "a test")
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("influence", "sections"),
    [(2.0, {"run": {"reproducible": True}}), (2.0, {"averaging": {"mode": "local"}}), (0.5, {})],
)
def test_manifest_that_bounds_microbatches_is_another_run_and_refuses_where_nobody_could(
    influence: float, sections: dict[str, Any]
) -> None:
    plain, bounded = (parse_manifest(document(optimizer=one), "a test") for one in ({}, {"influence": 2.0}))
    assert plain.run_id != bounded.run_id
    assert parse_manifest(document(optimizer={"influence": 0.0}), "a test").run_id == plain.run_id
    with pytest.raises(ConfigError, match="leave it out|Leave optimizer.influence out") as caught:
        parse_manifest(document(optimizer={"influence": influence}, **sections), "a test")
    assert caught.value.key == "optimizer.influence"


@pytest.mark.parametrize("sections", [{"run": {"reproducible": True}}, {"averaging": {"mode": "local"}}])
def test_manifest_that_tests_trainers_is_another_run_and_refuses_where_nobody_could(sections: dict[str, Any]) -> None:
    plain, tested = (parse_manifest(document(optimizer=one), "a test") for one in ({}, {"trainer_test": True}))
    assert plain.run_id != tested.run_id
    assert parse_manifest(document(optimizer={"trainer_test": False}), "a test").run_id == plain.run_id
    with pytest.raises(ConfigError, match=r"Leave optimizer\.trainer_test out") as caught:
        parse_manifest(document(optimizer={"trainer_test": True}, **sections), "a test")
    assert caught.value.key == "optimizer.trainer_test"


def test_manifest_that_is_reproducible_refuses_int8_averaging_and_says_why() -> None:
    with pytest.raises(ConfigError, match="depends on which replica computed what") as caught:
        parse_manifest(document(averaging={"codec": "int8"}, run={"reproducible": True}), "a test")
    assert "averaging.codec" in str(caught.value)
    assert "run.reproducible = false" in str(caught.value)


@pytest.mark.parametrize("strategy", ["everyone", "server"])
def test_four_bits_are_averaged_where_each_replicas_own_sum_is_rounded(strategy: str) -> None:
    averaging = parse_manifest(document(averaging={"codec": "int4h", "strategy": strategy}), "a test").averaging
    assert averaging.feeds_back
    apart = {"mode": "local", "codec": "int4h", "strategy": strategy}
    assert parse_manifest(document(averaging=apart), "a test").averaging.feeds_back
    mixed = apart | {"strategy": "grid", "local": {"sync_every": 2}}
    assert parse_manifest(document(averaging=mixed), "a test").averaging.feeds_back, "all close in one round"
    assert not parse_manifest(document(averaging={"codec": "int8"}), "a test").averaging.feeds_back


@pytest.mark.parametrize(
    ("sections", "cause", "next_step"),
    [
        (
            {"averaging": {"mode": "local", "strategy": "hierarchy"}},
            "belongs to none of them",
            '"int8", or averaging.strategy',
        ),
        ({"averaging": {"strategy": "grid"}}, "belongs to none of them", '"int8", or averaging.strategy'),
        ({"averaging": {"strategy": "hierarchy"}}, "belongs to none of them", '"int8", or averaging.strategy'),
        ({"averaging": {}, "run": {"reproducible": True}}, "depends on which replica", "run.reproducible = false"),
    ],
)
def test_four_bits_are_refused_where_nobody_can_add_what_is_lost(
    sections: dict[str, Any], cause: str, next_step: str
) -> None:
    wanted = sections | {"averaging": {**sections["averaging"], "codec": "int4h"}}
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(**wanted), "a test")
    assert caught.value.key == "averaging.codec"
    assert cause in str(caught.value)
    assert next_step in str(caught.value)


@pytest.mark.parametrize("other", [{"strategy": "grid"}, {"codec": "int8"}])
def test_manifest_that_rounds_at_each_hop_what_must_be_rounded_alike_is_refused(other: dict[str, str]) -> None:
    for schedule in ("auto", "direct"):
        parse_manifest(document(averaging={"schedule": schedule, **other}), "a test")
    with pytest.raises(ConfigError, match="averaging.schedule"):
        parse_manifest(document(averaging={"schedule": "ring", **other}), "a test")


@pytest.mark.parametrize("strategy", ["random", "push-sum"])
def test_what_is_inexact_is_refused_where_gradients_are_averaged(strategy: str) -> None:
    parse_manifest(document(averaging={"mode": "local", "strategy": strategy}), "a test")
    with pytest.raises(ConfigError, match="averaging.strategy") as caught:
        parse_manifest(document(averaging={"strategy": strategy}), "a test")
    assert 'averaging.mode = "local"' in str(caught.value)


def test_replicas_that_train_apart_give_no_reproducible_run() -> None:
    with pytest.raises(ConfigError, match="run.reproducible"):
        parse_manifest(document(averaging={"mode": "local"}, run={"reproducible": True}), "a test")


@pytest.mark.parametrize(("key", "value"), [("steps", 4), ("fragments", 2), ("outer_lr", 1.0)])
def test_what_only_replicas_that_train_apart_read_is_refused_elsewhere(key: str, value: float) -> None:
    local = {"local": {key: value}}
    parse_manifest(document(averaging={"mode": "local", **local}), "a test")
    with pytest.raises(ConfigError, match='averaging.mode = "sync"') as caught:
        parse_manifest(document(averaging=local), "a test")
    assert caught.value.key == f"averaging.local.{key}"
    whole = parse_manifest(document(), "a test").averaging.local.model_dump()
    parse_manifest(document(averaging={"local": whole}), "a test")  # as a founded run's manifest says it


@pytest.mark.parametrize("strategy", ["server", "hierarchy"])
def test_strategy_that_brings_all_together_leaves_no_mixing_between(strategy: str) -> None:
    averaging = {"mode": "local", "strategy": strategy}
    assert parse_manifest(document(averaging=averaging), "a test").averaging.closing_strategy == strategy
    with pytest.raises(ConfigError, match="averaging.local.sync_every"):
        parse_manifest(document(averaging={**averaging, "local": {"sync_every": 2}}), "a test")


@pytest.mark.parametrize(
    ("local", "codec", "key"),
    [
        ({"fragments": 4, "sync_every": 2}, "float32", "averaging.local.fragments"),
        ({"mixing_weight": 0.5, "sync_every": 2}, "float32", "averaging.local.mixing_weight"),
        ({"fragments": 4}, "int4h", "averaging.codec"),
        ({"mixing_weight": 0.5}, "int4h", "averaging.codec"),
    ],
)
def test_fragments_are_refused_with_what_is_of_whole_weights(local: dict[str, Any], codec: str, key: str) -> None:
    averaging = {"mode": "local", "strategy": "grid"}
    parse_manifest(document(averaging={**averaging, "local": {**local, "sync_every": 1}}), "a test")
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(averaging={**averaging, "codec": codec, "local": local}), "a test")
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("local", "key"),
    [
        ({"fragments": 9}, "averaging.local.fragments"),
        ({"mixing_weight": 0.5, "outer_lr": 1.3}, "averaging.local.outer_lr"),
    ],
)
def test_fragments_without_a_turn_and_anchors_that_run_away_are_refused(local: dict[str, Any], key: str) -> None:
    run = {"name": "a-test", "steps": 8}
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(run=run, averaging={"mode": "local", "local": local}), "a test")
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("averaging", "key"),
    [
        ({"strategy": "grid", "local": {"quorum": 0.75, "sync_every": 2}}, "averaging.local.sync_every"),
        ({"strategy": "server", "local": {"quorum": 0.75}}, "averaging.strategy"),
        ({"mode": "sync", "local": {"quorum": 0.75}}, "averaging.local.quorum"),
    ],
)
def test_quorum_is_refused_where_all_are_needed(averaging: dict[str, Any], key: str) -> None:
    parse_manifest(document(averaging={"mode": "local", "local": {"quorum": 0.75}}), "a test")
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(averaging={"mode": "local", **averaging}), "a test")
    assert caught.value.key == key


def test_manifest_that_says_nothing_of_a_quorum_has_the_id_of_before_there_was_one() -> None:
    plain = parse_manifest(document(averaging={"mode": "local"}), "a test")
    assert not {"quorum", "grace", "may_miss"} & plain.model_dump()["averaging"]["local"].keys()
    said = parse_manifest(document(averaging={"mode": "local", "local": {"quorum": 0.75, "may_miss": 2}}), "a test")
    assert said.model_dump()["averaging"]["local"]["may_miss"] == 2
    assert said.run_id != plain.run_id


@pytest.mark.parametrize(("codec", "share"), [("float32", 1.0), ("int8", 0.25), ("int4h", 0.13)])
def test_links_of_late_replicas_are_judged_by_what_the_codec_sends(codec: str, share: float) -> None:
    manifest = parse_manifest(document(averaging={"mode": "local", "codec": codec}), "a test")
    assert late_rules(manifest).encoded == pytest.approx(share, rel=0.05)


def test_step_of_replicas_that_train_apart_has_all_batches_between_two_closes() -> None:
    averaging = {"mode": "local", "strategy": "grid", "local": {"steps": 3, "sync_every": 4}}
    manifest = parse_manifest(document(averaging=averaging, batch={"microbatches_per_step": 5}), "a test")
    assert (manifest.averaging.inner_steps, manifest.step_microbatches) == (12, 60)
    assert manifest.averaging.closing_strategy == "everyone"


def test_muon_of_a_wide_model_is_refused_where_copies_would_have_to_compute_it() -> None:
    wide = document(
        model={"dim": 2304, "heads": 24, "layers": 1, "vocab_size": 512},
        split={"stages": 1},
        optimizer={"name": "muon"},
    )
    with pytest.raises(ConfigError, match="shorter side is 2304") as caught:
        parse_manifest(wide, "a test")
    assert "run.copies = 0" in caught.value.remedy
    wide["run"] = {"copies": 0}
    assert parse_manifest(wide, "a test").optimizer.name == "muon"
    wide["run"], wide["averaging"] = {}, {"mode": "local"}  # there copies follow the outer optimizer
    assert parse_manifest(wide, "a test").run.copies > 0
    wide["averaging"], wide["model"]["dim"] = {}, 2016
    parse_manifest(wide, "a test")


def test_replicas_that_train_apart_are_no_more_than_the_microbatches_they_share() -> None:
    few = document(
        run={"start_when": {"stage_hosts": 6, "trainers": 1}},
        split={"stages": 2},
        batch={"microbatch_size": 1, "microbatches_per_step": 2},
        averaging={"mode": "local"},
    )
    with pytest.raises(ConfigError, match="each of 3 replicas"):
        parse_manifest(few, "a test")
    few["averaging"] = {"mode": "sync"}
    parse_manifest(few, "a test")


@pytest.mark.parametrize(
    ("given", "key", "meant"),
    [
        ({"averaging": {"stratgy": "grid"}}, "averaging.stratgy", "Did you mean strategy?"),
        ({"averaging": {"local": {"step": 4}}}, "averaging.local.step", "Did you mean steps?"),
        ({"averagin": {"mode": "local"}}, "averagin", "Did you mean averaging?"),
        ({"run": {"zzz": 1}}, "run.zzz", "Remove it from a.toml."),
    ],
)
def test_key_that_there_is_not_names_those_that_there_are(given: dict[str, Any], key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(**given), "a.toml")
    assert str(caught.value).startswith(f"{key} = ")
    assert "expected one of " in str(caught.value)
    assert caught.value.remedy.startswith(meant)


@pytest.mark.parametrize(("wire", "made_by"), [(WIRE_VERSION - 1, "an older"), (WIRE_VERSION + 1, "a newer")])
def test_manifest_of_another_wire_version_is_refused_whatever_else_it_says(wire: int, made_by: str) -> None:
    strange = {"run": {"wire": wire, "of": "then"}, "sections": {"of": "then"}}
    with pytest.raises(OtherWire) as caught:
        parse_manifest(strange, "run.toml")
    assert (caught.value.wire, caught.value.origin) == (wire, "run.toml")
    assert caught.value.why == f"run.toml is of {made_by} version of swarm"
    assert str(WIRE_VERSION) in caught.value.allowed
    assert caught.value.ending is Ending.INCOMPATIBLE


def test_manifest_whose_wire_version_is_none_is_a_mistake() -> None:
    for wire in (0, True, "2", None):
        with pytest.raises(ConfigError) as caught:
            parse_manifest(document(run={"wire": wire}), "run.toml")
        assert not isinstance(caught.value, OtherWire)


def test_run_id_depends_on_the_wire_version() -> None:
    assert f'"wire":{WIRE_VERSION}'.encode() in parse_manifest(document(), "a test").canonical()


def test_packing_is_named_only_where_rows_are_not_a_stream_and_refused_for_models_that_let_documents_leak() -> None:
    document = {"tokenizer": {"digest": "0" * 64}, "batch": {"packing": "documents"}}
    packed = parse_manifest(document, "RUN.toml")
    plain = parse_manifest(document | {"batch": {"packing": "stream"}}, "RUN.toml")
    assert b'"packing":"documents"' in packed.canonical()
    assert b"packing" not in plain.canonical(), "ids of runs stay as they were"
    theirs = {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
    model = {"family": "hf", "architecture": "mamba", "layers": 2, "width": 32, "vocab_size": 96, "context": 16}
    leaky = document | {"model": model | {"config": canonical(theirs)}}
    with pytest.raises(ConfigError, match="from one document of a row into the next") as caught:
        parse_manifest(leaky, "RUN.toml")
    assert caught.value.key == "batch.packing"


def test_hosts_move_only_where_copies_are_kept_also_in_runs_that_feed_steps_early() -> None:
    moving: dict[str, Any] = {"rebalance": {"mode": "auto"}, "speed": {"mode": "overlap"}}
    assert parse_manifest(document(**moving), "a test").rebalance.moves
    with pytest.raises(ConfigError, match="nobody keeps any") as caught:
        parse_manifest(document(**moving, run={"copies": 0}), "a test")
    assert "Set run.copies = 2" in str(caught.value)


FOUR_CENTRES = tuple(tuple(int(byte == each) for byte in range(256)) for each in range(4))
DOMAINS = {"route_by": "domain", "domains": ("legal", "code", "prose", "tables")}


@pytest.mark.parametrize("how", [{"route_by": "text", "centres": FOUR_CENTRES}, DOMAINS])
def test_variants_make_another_run_whose_stages_have_the_same_layers(how: dict[str, Any]) -> None:
    start = {"run": {"start_when": {"stage_hosts": 5}}}
    plain, several = (
        parse_manifest(document(split=split, **start), "a test") for split in ({}, {"variants": (1, 4), **how})
    )
    assert plain.run_id != several.run_id
    assert several.split.choices == 4
    stages = split_layers(several.model.layers, several.split)
    assert [spec.name for spec in stages] == ["stage-0", *(f"stage-1.v{each}of4" for each in range(4)), "ends"]
    assert len({(spec.first_layer, spec.last_layer) for spec in stages}) == 3


@pytest.mark.parametrize(
    ("split", "key", "words"),
    [
        ({"route_by": "text"}, "split.route_by", "Set split.variants"),
        ({"domains": ("legal",)}, "split.domains", "Set split.variants"),
        ({"variants": (4,), **DOMAINS}, "split.variants", "2 numbers"),
        ({"variants": (1, 1), **DOMAINS}, "split.variants", "one above 1"),
        ({"variants": (1, 65), **DOMAINS}, "split.variants.1", "64"),
        ({"variants": (1, 2)}, "split.route_by", '"text" or "domain"'),
        ({"variants": (1, 2), "route_by": "text"}, "split.centres", "at least 2"),
        ({"variants": (1, 2), "route_by": "text", "centres": FOUR_CENTRES, "domains": ("a",)}, "split.domains", "none"),
        ({"variants": (1, 5), **DOMAINS}, "split.domains", "at least 5"),
        ({"variants": (1, 2), "route_by": "domain", "domains": ("law", "law")}, "split.domains", "differ"),
        ({"variants": (1, 2), "route_by": "domain", "domains": ("law", "Two words")}, "split.domains.1", "small"),
        ({"variants": (1, 4), **DOMAINS, "centres": FOUR_CENTRES[:3]}, "split.centres", "each of the 4"),
        (
            {"variants": (1, 2), "route_by": "text", "centres": ((0,) * 256, FOUR_CENTRES[0])},
            "split.centres",
            "no text",
        ),
        ({"variants": (1, 2), "route_by": "text", "centres": ((0,) * 255,)}, "split.centres.0", "256"),
        ({"variants": (1, 4), "routes": "organisation", **DOMAINS}, "split.routes", "every variant"),
        ({"variants": (2, 4), **DOMAINS}, "run.start_when.stage_hosts", "at least 6"),
    ],
)
def test_variants_that_no_microbatch_finds_or_nobody_holds_are_refused(
    split: dict[str, Any], key: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_manifest(document(split=split, run={"start_when": {"stage_hosts": 5}}), "a test")
    assert caught.value.key == key


MIXED = {"layers": 4, "experts": 4}
STEERED = MIXED | {"balance": {"kind": "bias"}}


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("model.top_k", {"model": {"top_k": 2}}),
        ("model.expert_every", {"model": {"expert_every": 1}}),
        ("model.capacity", {"model": {"capacity": 2.0}}),
        ("model.balance", {"model": {"balance": {"kind": "none"}}}),
        ("model.experts", {"model": {"experts": 1}}),
        ("model.top_k", {"model": {**MIXED, "top_k": 5}}),
        ("model.expert_every", {"model": {**MIXED, "expert_every": 5}}),
        ("model.capacity", {"model": {**MIXED, "capacity": 0.5}}),
        ("model.balance.kind", {"model": {**MIXED, "balance": {"kind": "even"}}}),
        ("model.lora", {"model": {**MIXED, "lora": {"rank": 4}}}),
        ("model.expert_every", {"model": {**MIXED, "layers": 6, "share": "stages"}}),
        ("averaging.codec", {"model": STEERED, "averaging": {"codec": "int8"}}),
        ("averaging.codec", {"model": STEERED, "averaging": {"codec": "int4h"}}),
        ("averaging.mode", {"model": STEERED, "averaging": {"mode": "local"}}),
    ],
)
def test_experts_that_cannot_be_trained_are_refused(key: str, sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(**sections), "a test")
    assert caught.value.key == key


def test_manifest_without_experts_says_nothing_of_them_and_one_with_them_has_another_id() -> None:
    plain, mixed = (parse_manifest(document(model=model), "a test") for model in ({"layers": 4}, MIXED))
    assert not {"experts", "top_k", "expert_every", "capacity", "balance"} & plain.model_dump()["model"].keys()
    assert mixed.run_id not in (plain.run_id, parse_manifest(document(model=STEERED), "a test").run_id)
    aside = {"averaging": {"codec": "int8"}}
    assert parse_manifest(document(model=MIXED, **aside), "a test").averaging.codec == "int8"


@pytest.mark.parametrize(
    ("key", "sections", "words"),
    [
        ("model.sparsity", {"model": {"sparsity": 1.0}}, "0.99"),
        ("model.sparsity", {"model": {"sparsity": -0.1}}, "0"),
        ("model.sparsity", {"model": {"sparsity": 0.75, "lora": {"rank": 4}}}, "adapters are beside whole matrices"),
        ("model.sparsity", {"model": {"sparsity": 0.75, "layers": 4, "share": "stages"}}, "from layer to layer"),
        ("model.sparsity", {"model": {"sparsity": 0.75}, "optimizer": {"name": "muon"}}, "Muon looks at"),
        ("model.sparsity", {"model": {"sparsity": 0.75}, "optimizer": {"name": "adafactor"}}, "Adafactor looks at"),
        ("model.sparsity", {"model": {"sparsity": 0.75}, "split": {"tensor": 2}}, "stay whole on one device"),
        (None, {"model": {"sparsity": 0.75}, "optimizer": {"name": "sgd"}}, ""),
        (None, {"model": {"sparsity": 0.75, **MIXED}}, ""),
    ],
)
def test_sparse_models_that_cannot_be_trained_are_refused(
    key: str | None, sections: dict[str, Any], words: str
) -> None:
    if key is None:
        assert parse_manifest(document(**sections), "a test").run_id != parse_manifest(document(), "a test").run_id
        return
    with pytest.raises(ConfigError, match=words) as caught:
        parse_manifest(document(**sections), "a test")
    assert caught.value.key == key


def test_manifest_of_a_model_that_is_not_sparse_says_nothing_of_it() -> None:
    assert "sparsity" not in parse_manifest(document(), "a test").model_dump()["model"]


OWN = {"variants": (1, 2), "route_by": "domain", "domains": ("law", "code"), "own": {"code": "acme"}}


@pytest.mark.parametrize(
    ("split", "sections", "key", "words"),
    [
        ({"own": {"code": "acme"}}, {}, "split.own", "Set split.variants"),
        ({**OWN, "own": {"poems": "acme"}}, {}, "split.own", "law, code; poems is none"),
        ({**OWN, "own": {"code": ""}}, {}, "split.own", "an organisation for"),
        ({**OWN, "own": {"code": "two words"}}, {}, "split.own.code", "letters|match"),
        ({**OWN, "domains": ("law", "code", "poems")}, {}, None, ""),
        ({**OWN, "domains": ("law", "code", "poems", "trade")}, {}, "split.own", "a variant of its own"),
        ({**OWN, "route_by": "text", "domains": (), "centres": FOUR_CENTRES}, {}, "split.own", "of any kind"),
        (OWN, {"admission": {"mode": "open"}}, "split.own", "an invite for one peer"),
        (OWN, {"run": {"reproducible": True}}, "split.own", "others feed"),
        (OWN, {"admission": {"mode": "token", "organisation": "acme"}}, None, ""),
    ],
)
def test_expert_that_no_organisation_can_keep_to_itself_is_refused(
    split: dict[str, Any], sections: dict[str, dict[str, Any]], key: str | None, words: str
) -> None:
    run = {"start_when": {"stage_hosts": 5}, **sections.get("run", {})}
    made = document(split=split, **{"admission": {"mode": "token"}, **sections, "run": run})
    if key is None:
        owned = parse_manifest(made, "a test")
        assert owned.split.owners == {"stage-1.v1of2": "acme"}
        return
    with pytest.raises(ConfigError, match=words) as caught:
        parse_manifest(made, "a test")
    assert caught.value.key == key


GPT = {"layers": 4, "share": "stages", "delink_at": 5}


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("model.delink_at", {"model": {**GPT, "share": "none"}}),
        ("model.delink_at", {"model": {**GPT, "delink_at": 60}}),
        ("model.share", {"model": {**GPT, "lora": {"rank": 4}}}),
        ("model.layers", {"model": {**GPT, "layers": 5}}),
        ("split.layers_per_stage", {"model": GPT, "split": {"layers_per_stage": [1, 3]}}),
        ("split.stages", {"model": GPT, "split": {"stages": 1}}),
        ("split.ends", {"model": GPT, "split": {"ends": "hosted"}}),
        ("run.start_when.stage_hosts", {"model": GPT, "run": {"start_when": {"stage_hosts": 1}}}),
        (
            "split.variants",
            {"model": GPT, "split": {"variants": (1, 2), **DOMAINS}, "run": {"start_when": {"stage_hosts": 3}}},
        ),
        ("averaging.mode", {"model": GPT, "averaging": {"mode": "local"}}),
        ("averaging.guard", {"model": GPT, "averaging": {"guard": "leave-out"}}),
        ("speed.mode", {"model": GPT, "speed": {"mode": "overlap"}}),
        ("verify.audit", {"model": GPT, "verify": {"audit": 0.05}}),
    ],
)
def test_stages_that_cannot_share_their_layers_are_refused(key: str, sections: dict[str, Any]) -> None:
    shared = parse_manifest(document(model=GPT), "a test")
    assert shared.parts == ("shared-2", "ends")
    assert shared.cuts == (shared.parts, ("stage-0", "stage-1", "ends"))
    assert shared.run_id != parse_manifest(document(model={"layers": 4}), "a test").run_id
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(**sections), "a test")
    assert caught.value.key == key
