"""Advice: what fits and what does not, the search, where figures come from, and what is written."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dtctl.advise.advice import build_choice_json, build_train_settings, choose_best_layouts
from dtctl.advise.config import parse_model_config, read_config
from dtctl.advise.gather import AdviseOptions, build_advise_task
from dtctl.advise.hardware import Hardware, find_gpu_by_name, read_gpu_table, read_network_table
from dtctl.advise.model import build_decoder_model
from dtctl.advise.published_models import build_usual_model
from dtctl.advise.search import PlanningTask, list_runnable_choices
from dtctl.advise.sizes import format_short_count
from dtctl.advise.spec_editor import format_yaml_value, set_train_settings, write_spec_settings
from dtctl.errors import UsageError
from dtctl.estimate.memory import GIB, ParallelLayout, estimate_layout_memory
from dtctl.estimate.model import ModelProfile
from tests.command_line import dtctl
from tests.facts import raises

SMALL = build_decoder_model(layers=12, hidden=768, vocab=50257, seq=1024, tied=True, name="GPT-2")
BIG = build_decoder_model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, seq=8192, gated=True)


def cluster(count: int, *, kind: str = "H100", per_node: int = 8) -> Hardware:
    return Hardware(gpu=find_gpu_by_name(kind), gpus=count, per_node=min(per_node, count), network=400)


def plain(params: float) -> ModelProfile:
    return build_decoder_model(layers=40, hidden=5120, vocab=32000, seq=2048, params=params)


def test_a_search_over_1024_gpus_takes_a_moment() -> None:
    found = choose_best_layouts(PlanningTask(model=BIG, hardware=cluster(1024), global_batch=2048, beyond=True))
    assert found.evaluated < 20_000, "layouts that are priced, at 30 us each"
    assert found.best.fits


def test_every_layout_uses_all_gpus_and_the_whole_batch() -> None:
    for one in list_runnable_choices(PlanningTask(model=BIG, hardware=cluster(64), global_batch=256, beyond=True)):
        layout = one.layout
        assert layout.workers == 64
        assert layout.micro_batch * layout.accumulate * layout.data == 256
        assert BIG.kv_heads % layout.tp == 0


def test_a_small_model_needs_nothing_but_ddp() -> None:
    best = choose_best_layouts(PlanningTask(model=SMALL, hardware=cluster(8))).best
    assert (best.strategy, best.layout.recompute) == ("ddp", "none")


def test_one_gpu_is_single() -> None:
    assert choose_best_layouts(PlanningTask(model=SMALL, hardware=cluster(1))).best.strategy == "single"


@pytest.mark.parametrize(("params", "count"), [(13e9, 4), (70e9, 8)])
def test_known_lies_of_tables_by_size_do_not_fit_without_sharding_or_offloading(params: float, count: int) -> None:
    """A guide gives ZeRO-2 on 4 GPUs for 13B and ZeRO-3 on 8 for 70B: states alone are 71.5 and 140 GB."""
    for one in list_runnable_choices(PlanningTask(model=plain(params), hardware=cluster(count, kind="A100"))):
        layout = one.layout
        if layout.dp * layout.fsdp == count and not layout.offload and (layout.zero or params > 60e9):
            assert not one.fits
            assert one.missing_bytes > 0


def test_what_does_not_fit_says_by_how_much_and_what_it_is() -> None:
    found = choose_best_layouts(PlanningTask(model=plain(70e9), hardware=cluster(1)))
    assert not found.best.fits
    assert "nothing fits" in found.reasons[0]
    assert f"{found.best.missing_bytes / GIB:.1f} too many" in found.reasons[0]
    assert "states" in found.reasons[1]


def test_sharing_and_recomputing_only_ever_save_memory() -> None:
    def total(**how: object) -> float:
        return estimate_layout_memory(BIG, ParallelLayout(**how)).tensors  # type: ignore[arg-type]

    assert total(fsdp=8) > total(fsdp=16) > total(fsdp=64)
    recomputed = [total(fsdp=64, micro_batch=8, recompute=how) for how in ("none", "selective", "full")]
    assert recomputed == sorted(recomputed, reverse=True)
    assert len(set(recomputed)) == 3
    assert total(recompute="none") > total(recompute="full"), "gradients need less room than all that is kept"
    assert total(dp=8) > total(dp=8, zero=1)
    assert total(tp=2) > total(tp=8)
    assert total(fsdp=8) > total(fsdp=8, offload=True)
    assert total(micro_batch=2) > total(micro_batch=1)


@pytest.mark.parametrize(
    ("layout", "bytes_each"),
    [
        (ParallelLayout(), 16),
        (ParallelLayout(dp=4), 16),
        (ParallelLayout(dp=4, zero=1), 8 + 8 / 4),
        (ParallelLayout(fsdp=4), 16 / 4),
        (ParallelLayout(dp=2, fsdp=4), 16 / 4),
        (ParallelLayout(tp=2), 16 / 2),
        (ParallelLayout(fsdp=4, tp=2), 16 / 8),
    ],
)
def test_states_are_what_adamw_in_fp32_needs(layout: ParallelLayout, bytes_each: float) -> None:
    assert estimate_layout_memory(SMALL, layout).states == pytest.approx(bytes_each * SMALL.params)


def test_the_fastest_that_fits_wins_and_of_those_as_fast_the_simplest() -> None:
    asked = PlanningTask(model=BIG, hardware=cluster(64), global_batch=256)
    found = choose_best_layouts(asked)
    fastest = max(one.speed.tokens_per_s_per_gpu for one in list_runnable_choices(asked) if one.fits)
    assert found.best.fits
    assert found.best.speed.tokens_per_s_per_gpu >= 0.97 * fastest
    speeds = [one.speed.tokens_per_s_per_gpu for one in found.alternatives if one.fits]
    assert speeds == sorted(speeds, reverse=True)


def test_the_json_has_the_keys_of_the_contract() -> None:
    found = choose_best_layouts(PlanningTask(model=SMALL, hardware=cluster(8)))
    shown = build_choice_json(found.best, found.reasons)
    assert {"strategy", "mesh", "micro_batch", "memory_gib", "fits", "tokens_per_s_per_gpu", "reasons"} <= set(shown)
    assert {"total", "states", "activations", "overhead"} <= set(shown["memory_gib"])
    assert {"dp", "fsdp", "tp", "pp"} <= set(shown["mesh"])
    parts = sum(value for name, value in shown["memory_gib"].items() if name != "total")
    assert parts == pytest.approx(shown["memory_gib"]["total"], abs=0.01)


@pytest.mark.parametrize(
    ("name", "gib"),
    [("L40S", 45), ("A40", 45), ("L4", 22.5), ("T4", 15), ("H100-NVL", 93.5), ("GH200", 95.5), ("A10", 22.5)],
)
def test_memory_is_what_nvidia_smi_shows_and_not_what_is_sold(name: str, gib: float) -> None:
    assert find_gpu_by_name(name).memory == gib


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("gcp-a3-high", 100), ("gcp-a3-mega", 200), ("gcp-a3-ultra", 400), ("gcp-a4", 400), ("xdr-8", 800),
        ("efa-p5en", 400), ("efa-p6-b200", 400), ("efa-p6-b300", 800), ("efa-p6e-gb200", 200),
    ],
)  # fmt: skip
def test_networks_of_clouds_are_known(name: str, node: float) -> None:
    assert read_network_table()[name] == node


def test_hardware_has_sources_and_the_runtimes_peaks() -> None:
    from dtctl.runtime.telemetry.hardware import find_peak_flops

    for one in read_gpu_table().values():
        assert one.source.startswith("https://"), one.name
        known = find_peak_flops(one.name.replace("-", " "), "bf16")
        if known is not None:
            assert one.half * 1e12 == pytest.approx(known), one.name
    assert min(read_network_table().values()) > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": "7B"}, "GPUs"),
        ({"gpus": 8}, "model"),
        ({"gpus": 0, "params": "7B"}, "--gpus 1"),
        ({"gpus": 8, "params": "-7B"}, "above 0"),
        ({"gpus": 8, "params": "many"}, "number"),
        ({"gpus": 8, "params": "7B", "gpu": "H1000"}, "GPU H1000"),
        ({"gpus": 8, "params": "7B", "gpu_memory": "0GiB"}, "above 0"),
        ({"gpus": 8, "params": "7B", "network": "string"}, "network string"),
        ({"gpus": 8, "params": "7B", "network": "-1"}, "GB/s"),
        ({"gpus": 8, "params": "1e30"}, "machine"),
        ({"gpus": 8, "params": "1e308T"}, "machine"),
        ({"gpus": 999999937, "per_node": 1, "params": "7B"}, "1000000"),
        ({"gpus": 8, "per_node": 0, "params": "7B"}, "--gpus-per-node"),
        ({"gpus": 12, "per_node": 8, "params": "7B"}, "divided nodes"),
        ({"gpus": 8, "layers": 4, "hidden": 100, "heads": 7}, "7 heads"),
        ({"gpus": 8, "layers": 4, "hidden": 4096, "params": "1M"}, "fewer"),
        ({"gpus": 8, "layers": -4, "hidden": 64}, "--layers 1"),
        ({"gpus": 8, "config": Path("nothing.json")}, "read"),
    ],
)
def test_bad_input_is_told(options: dict[str, object], text: str) -> None:
    with raises(UsageError, text):
        build_advise_task(AdviseOptions(**options), None)  # type: ignore[arg-type]


def test_a_batch_that_cannot_be_divided_is_told() -> None:
    with raises(UsageError, "64 divided"):
        choose_best_layouts(PlanningTask(model=SMALL, hardware=cluster(64), global_batch=1, compiled=True))


def test_a_config_of_hugging_face(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu",
                "max_position_embeddings": 131072, "tie_word_embeddings": False,
            }
        )
    )  # fmt: skip
    model = read_config(path, seq=None)
    assert model.params == pytest.approx(8.03e9, rel=1e-3)
    assert model.seq == 8192
    gpt2 = parse_model_config({"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}, source="x", seq=1024)
    assert gpt2.params == pytest.approx(124e6, rel=0.01)
    for text, wanted in (
        ("{", "is not JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"n_layer": 3}', "hidden cannot be found"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=wanted):
            read_config(path, seq=None)


SPEC = """\
# my job
cluster: {transport: local, slots: 2}
job:
  script: train.py
train:                 # how
  strategy: ddp        # at first
  lr: 1.0e-3
  fsdp:
    reshard_after_forward: true
  model: {layers: 4}
# the end
"""


def test_writing_keeps_everything_else_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "dtctl.yaml"
    path.write_text(SPEC)
    write_spec_settings(path, {"strategy": {"dp": 2, "tp": 2}, "fsdp": {"cpu_offload": True}, "micro_batch": 4})
    wanted = SPEC.replace("  strategy: ddp        # at first\n", "  strategy: {dp: 2, tp: 2}        # at first\n")
    wanted = wanted.replace("  fsdp:\n    reshard_after_forward: true\n", "  fsdp: {cpu_offload: true}\n")
    wanted = wanted.replace("# how\n", "# how\n  micro_batch: 4\n")
    assert path.read_text() == wanted
    assert [one.name for one in tmp_path.iterdir()] == ["dtctl.yaml"]


@pytest.mark.parametrize("text", [SPEC, "job: {script: t.py}\ncluster: {transport: local}\n"])
def test_writing_keeps_line_ends_links_and_a_byte_order_mark(tmp_path: Path, text: str) -> None:
    (tmp_path / "real.yaml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (tmp_path / "dtctl.yaml").symlink_to("real.yaml")
    write_spec_settings(tmp_path / "dtctl.yaml", {"strategy": "fsdp", "micro_batch": 4})
    assert (tmp_path / "dtctl.yaml").is_symlink()
    written = (tmp_path / "real.yaml").read_bytes()
    assert written.startswith(b"\xef\xbb\xbf")
    assert written.count(b"\n") == written.count(b"\r\n") > text.count("\n")
    assert written[3:].decode().replace("\r\n", "\n") == set_train_settings(
        text, {"strategy": "fsdp", "micro_batch": 4}
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dtctl.yaml", "real.yaml"]


def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    from dtctl.report.run import check_out

    (tmp_path / "null").symlink_to("/dev/null")
    with pytest.raises(UsageError) as refused:
        write_spec_settings(tmp_path / "null", {"strategy": "ddp"})
    assert refused.value.hint == "name the spec itself"
    with raises(UsageError, "folder") as caught:
        check_out(tmp_path, option="--plot")
    assert caught.value.where == "--plot"
    assert Path("/dev/null").is_char_device()
    (tmp_path / "page.html").symlink_to("elsewhere.html")
    assert check_out(tmp_path / "page.html") == (tmp_path / "elsewhere.html").resolve()


def test_writing_adds_a_section_and_leaves_one_in_one_line_alone() -> None:
    assert (
        set_train_settings("job: {script: t.py}", {"strategy": "ddp"})
        == "job: {script: t.py}\ntrain:\n  strategy: ddp\n"
    )
    with raises(UsageError, "line"):
        set_train_settings("train: {lr: 1.0}\n", {"strategy": "ddp"})


def test_settings_are_told_as_they_stand_in_the_spec() -> None:
    assert format_yaml_value({"fsdp": 8, "tp": 2}) == "{fsdp: 8, tp: 2}"


def test_of_equally_fast_choices_the_one_with_the_larger_micro_batch_is_taken_and_its_batch_told() -> None:
    asked = PlanningTask(model=SMALL, hardware=cluster(8), global_batch=256)
    found = choose_best_layouts(asked)
    pace = f"{found.best.speed.tokens_per_s_per_gpu:.4g}"
    same = [
        one
        for one in list_runnable_choices(asked)
        if one.fits and one.axes == found.best.axes and f"{one.speed.tokens_per_s_per_gpu:.4g}" == pace
        if one.memory.total <= 0.9 * one.budget
    ]
    assert found.best.layout.micro_batch == max(one.layout.micro_batch for one in same) > 1
    assert found.best.memory.total < 0.9 * found.best.budget
    micro = found.best.layout.micro_batch
    assert f"256 samples per step (micro batch {micro} x {32 // micro} accumulated x 8 replicas)" in found.reasons[1]
    assert build_choice_json(found.best)["global_batch"] == 256


def test_a_batch_that_shuts_data_parallelism_out_is_told_with_the_next_one_that_does_not() -> None:
    found = choose_best_layouts(PlanningTask(model=SMALL, hardware=cluster(12, per_node=4), global_batch=7))
    assert found.best.layout.data == 1
    (told,) = (reason for reason in found.reasons if "samples per step" in reason)
    assert told.startswith("7 samples per step")
    assert "12 GPUs" in told
    assert "--batch 12" in told
    assert (
        choose_best_layouts(
            PlanningTask(model=SMALL, hardware=cluster(12, per_node=4), global_batch=12)
        ).best.layout.data
        == 12
    )


@pytest.mark.parametrize(
    ("count", "per_node", "most"), [(999983, 1, 200), pytest.param(7560, 8, 40_000, marks=pytest.mark.slow)]
)
def test_a_search_over_very_many_gpus_ends(count: int, per_node: int, most: int) -> None:
    """A prime and a number with 64 divisors; what is tried grows far less than the number of meshes."""
    assert 0 < len(list_runnable_choices(PlanningTask(model=SMALL, hardware=cluster(count, per_node=per_node)))) < most


def test_what_is_far_too_large_has_a_bar_of_one_line() -> None:
    from dtctl.cli.common.advise_view import format_memory_bar

    found = choose_best_layouts(PlanningTask(model=build_usual_model(1e19, seq=2048, name="huge"), hardware=cluster(1)))
    assert not found.best.fits
    assert len(format_memory_bar(found.best)) == 30 + 1 + 12 + 1


def test_what_the_runtime_has_no_axis_for_is_not_written() -> None:
    asked = PlanningTask(model=BIG, hardware=cluster(64), beyond=True)
    with_cp = next(one for one in list_runnable_choices(asked) if one.layout.cp > 1 < one.layout.pp)
    with raises(UsageError, "pipeline"):
        build_train_settings(asked, with_cp)


def test_the_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return dtctl("advise", *arguments, cwd=tmp_path)

    done = run("--params", "7B", "--gpus", "16", "--gpu", "A100", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recommendation"]["fits"] is True
    done = run("--params", "70B", "--gpus", "1")
    assert done.returncode == 4
    assert "nothing fits" in done.stdout
    assert run("--params", "7B").returncode == 2
    (tmp_path / "dtctl.yaml").write_text(SPEC.replace("{layers: 4}", "{layers: 4, embed: 128, heads: 4, context: 128}"))
    done = run("--write")
    assert done.returncode == 0, done.stderr
    assert "precision: bf16" in (tmp_path / "dtctl.yaml").read_text()
    assert "computed with 4 blocks of width 128, 4 heads of 32" in done.stdout
    done = run("-", "--params", "13B", "--write")
    assert (done.returncode, "standard input cannot be written" in done.stderr) == (2, True)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2}')
    done = run("--config", "config.json", "--gpus", "2", "--json")
    assert done.returncode == 0, done.stderr
    model = json.loads(done.stdout)["model"]
    assert "2 blocks of width 512, 4 heads of 128" in model["assumed"]
    assert len(model["warnings"]) == 3
    assert "warning: num_attention_heads is missing" in done.stderr


def test_what_cannot_be_measured_is_told() -> None:
    from dtctl.advise.measure import measure_training_memory

    with raises(UsageError, "GPT"):
        measure_training_memory(BIG, strategy="ddp", workers=1)
    with raises(UsageError, "4 workers 43200.0 GiB"):
        measure_training_memory(
            build_decoder_model(layers=900, hidden=8192, vocab=64, seq=8, tied=True), strategy="ddp", workers=4
        )


@pytest.mark.parametrize(
    ("number", "text"), [(7_224_000, "7.22M"), (999_600, "1M"), (8.03e9, "8.03B"), (12, "12"), (1.6e12, "1.6T")]
)
def test_numbers_have_the_unit_that_people_use(number: float, text: str) -> None:
    assert format_short_count(number) == text
