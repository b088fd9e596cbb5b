"""Verdicts on transforms: computed, true to what tables do, and said when they are used."""

import math
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.optax import check_compatibility, rowwise
from tests.support.marks import slow
from tests.support.transforms import EXTRA, row_by_row, transforms

pytestmark = pytest.mark.usefixtures("promotion")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "optimizers.md"


@pytest.mark.parametrize(
    "tx, verdict",
    [(optax.sgd(0.1), "equal"), (optax.sgd(0.1, momentum=0.9), "lazy"), (optax.clip_by_global_norm(1.0), "per row")],
)
@row_by_row
def test_verdicts(tx, verdict):
    found = check_compatibility(tx, 4)
    assert found.verdict == verdict and str(found).startswith(verdict)
    assert (found.every_step > 1e-3) == (verdict == "per row") and (found.some_steps > 1e-3) == (verdict != "equal")
    assert bool(found.mend) == (verdict != "equal")


def test_whether_it_is_a_row_program_is_said():
    scheduled = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 9))
    cumulated = optax.stateless(lambda updates, params: jax.tree.map(lambda x: jax.lax.cumsum(x, x.ndim - 1), updates))
    found = check_compatibility(scheduled, 4)
    assert "value = fma_f" in found.program and found.no_program == "" and "no row program" not in str(found)
    found = check_compatibility(optax.chain(cumulated, scheduled), 4)
    assert found.program is None and found.no_program == "cumsum" and "no row program (cumsum)" in str(found)
    cast = optax.stateless(lambda updates, params: jax.tree.map(lambda x: x.astype(jnp.uint32) + 0.0, updates))
    assert check_compatibility(cast, 4).no_program == "a cast of float32 to uint32"


@slow
def test_the_leaves_of_a_state():
    """Each is a slot or a global, and what is a slot under which count is said."""
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 9))
    leaves = check_compatibility(tx, 4).leaves
    found = {leaf.name.split(".")[-1]: leaf for leaf in leaves}
    assert found["mu"].kept == "slot" and found["mu"].type == "float32[4]" and found["mu"].verdict == "lazy"
    counts = [leaf for leaf in leaves if leaf.type == "int32[]"]
    assert {(leaf.kept, leaf.slot_under) for leaf in counts} == {("slot", ("auto", "row")), ("global", ("row",))}
    free = check_compatibility(optax.contrib.schedule_free_sgd(0.1), 4)
    (z,) = [leaf for leaf in free.leaves if leaf.name == ".z"]
    assert z.from_value and "starts from the row" in str(free)


def held_back():
    """Sums two steps, as optax.apply_every does, by another name."""

    def update(grads, state, params=None):
        first = state["count"] % 2 == 0
        held = jnp.where(first, 0, state["held"]) + grads
        return jnp.where(first, 0, held), {"count": state["count"] + 1, "held": held}

    return optax.GradientTransformation(
        lambda params: {"count": jnp.zeros((), jnp.int32), "held": jnp.zeros_like(params)}, update
    )


@slow
def test_gradients_are_lost_or_doubled():
    """By a row's own count those of its first touch of two, by the steps of all what is left from the cycle before."""
    found = check_compatibility(held_back(), 4)
    assert {count: of.reached for count, of in found.counts.items()} == {
        "auto": (0.0, 1.0), "row": (0.0, 1.0), "global": (0.0, 2.0)
    }  # fmt: skip
    assert "accumulate" in found.mend and "0 to 2 of its way" in str(found)
    assert ["accumulate" in leaf.mend for leaf in found.leaves] == [True, True]
    assert {of.reached for of in check_compatibility(optax.adagrad(0.1), 4).counts.values()} == {(1.0, 1.0)}
    least, most = check_compatibility(optax.adam(0.1), 4).counts["auto"].reached
    assert 0.1 < least < 1 and most < 1.1


@slow
def test_mends():
    """What is said to help does: catch_up, and one count for all rows where a schedule reads it."""
    for tx, words, leaf in (
        (optax.adam(0.1), r"catch_up\(tx\) makes rows equal", "catch_up"),
        (optax.lion(0.1), "no closed form", "none"),
        (kvjax.optax.gap_adam(0.1), "gap_adam does so by itself", "none"),
        (optax.contrib.madgrad(optax.linear_schedule(0.1, 0.0, 5)), 'count="global"', "none"),
        (optax.clip_by_global_norm(1.0), "joint", ""),
        (optax.clip_by_block_rms(1.0), "^none if norms of a row are meant", ""),
    ):
        found = check(tx, 4)
        assert re.search(words, found.mend)
        assert all(leaf in x.mend for x in found.leaves if x.type == "float32[4]" and x.verdict != "equal")
    scheduled = optax.contrib.madgrad(optax.linear_schedule(0.1, 0.0, 5))
    reached = {count: of.reached[1] for count, of in check_compatibility(scheduled, 4).counts.items()}
    assert reached["auto"] > 10 and reached["global"] < 1
    (count,) = [leaf for leaf in check_compatibility(optax.adam(0.1), 4).leaves if leaf.type == "int32[]"]
    assert 'count="global"' in count.mend


@slow
def test_a_count_that_is_shared_changes_the_verdict_of_its_leaf():
    """Adam's bias correction equals dense training only if all rows share the count."""
    of = {count: check_compatibility(rowwise(optax.adam(0.1), count), 4).leaves[0] for count in ("row", "global")}
    assert (of["row"].kept, of["row"].verdict) == ("slot", "lazy")
    assert (of["global"].kept, of["global"].verdict, of["global"].difference) == ("global", "equal", 0.0)


def test_extra_arguments():
    plateau = optax.contrib.reduce_on_plateau()
    assert check_compatibility(plateau, 4, value=1.0).verdict == "equal"
    with pytest.raises(TypeError, match=r"check_compatibility: want the extra arguments .*'value'"):
        check_compatibility(plateau, 4)
    with pytest.raises(TypeError, match="optax transform"):
        check_compatibility(0.1, 4)


@slow
def test_a_factored_state_of_many_rows_is_told():
    """Dense adafactor would factor the array; a row never is."""
    assert "the shapes of its state" not in check(optax.scale_by_factored_rms(), 8).reason
    assert "the shapes of its state" in check(optax.scale_by_factored_rms(), 128).reason


def check(tx, dim, **extra):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check_compatibility(tx, dim, **extra)


WRONG = {
    "MultiSteps": "accumulate", "apply_every": "accumulate", "apply_if_finite": "whole steps", "sam": "the loss",
    "prodigy": "choose a rate", "dadapt_adamw": "choose a rate", "dog": "choose a rate", "dowg": "choose a rate",
    "momo": "choose a rate", "momo_adam": "choose a rate", "mechanize": "choose a rate", "polyak_sgd": "choose a rate",
    "lbfgs": "the loss", "galore": "whole matrices", "muon": "whole matrices", "noisy_sgd": "random keys",
    "lookahead": "LookaheadParams", "sophia": "the loss", "monitor": "always has the same leaves",
}  # fmt: skip


def test_what_would_be_wrong_row_by_row_is_refused(make):
    found, table = transforms(), make(4)
    for name, words in WRONG.items():
        with pytest.raises(ValueError, match=rf"kvjax: rowwise: want .*{words}"):
            kvjax.optax.partition(dense=optax.sgd(1.0), tables=found[name]).init({"t": table})
    refused = check_compatibility(optax.chain(optax.clip(1.0), found["muon"]), 4)
    assert refused.verdict == "refused"
    # Each leaf of the state that there would be, and what is to be done.
    assert {(x.verdict, x.mend == refused.mend) for x in refused.leaves} == {("refused", True)}
    leaves = {x.name: x for x in check_compatibility(optax.add_noise(0.1, 0.5, key=0), 4).leaves}
    assert leaves[".rng_key"].type == "key<fry>[]" and "slot (global with" in str(check(found["MultiSteps"], 4))


@slow
def test_it_is_refused_inside_of_whatever_holds_it(make):
    found, table = transforms(), make(4)
    grads = kvjax.SparseRows(np.array([1]), jnp.ones((1, 4)))
    for name, words in WRONG.items():
        tx = getattr(found[name], "gradient_transformation", lambda tx=found[name]: tx)()
        injected = optax.inject_hyperparams(lambda rate, tx=tx: optax.chain(tx, optax.scale(rate)))
        for within in (
            optax.named_chain(("a", optax.clip(1.0)), ("b", tx)), optax.masked(tx, True), injected(rate=0.1),
            optax.multi_transform({"a": tx, "b": optax.sgd(0.1)}, "a"), optax.flatten(tx),
            kvjax.optax.segments({"a": (0, tx)}, rest=optax.sgd(0.1)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=rf"kvjax: rowwise: want .*{words}"):
                rowwise(within).init(4)
        with pytest.raises(ValueError, match=rf"kvjax: rowwise: want .*{words}"):
            table.apply(tx, grads)
    assert len(table) == 0


def test_a_changed_meaning_warns_once():
    tx = optax.lamb(0.1)
    with pytest.warns(UserWarning, match="kvjax: rows depend on each other .* by scale_by_trust_ratio") as seen:
        for _ in range(3):
            for dim in (2, 4):
                for count in ("auto", "global"):
                    rowwise(tx, count).init(dim)
    assert len(seen) == 1
    rowwise(optax.adamw(0.1)).init(4)  # warnings are errors here


KEY, MASK = jax.random.key(0), np.ones((1000, 4), np.float32)


def own(f, init=lambda params: None):
    """A transform of the user's, by what it makes of gradients (and of what it has kept from `init`)."""
    return optax.GradientTransformation(init, lambda g, s, p=None: (f(g) if s is None else f(g, s), s))


def mean_over_rows(grads):
    return grads - grads.mean(0)


@slow
def test_transforms_of_the_users_own():
    """Columns may change places, be left out and set; rows that do, or meet, are said, by the name of the function."""
    for f in (lambda g: g[:, ::-1], lambda g: g.at[..., 0].set(0), lambda g: g.at[:, 1:3].multiply(2.0),
              lambda g: g[:, np.array([1, 0, 2, 3])], lambda g: jnp.pad(g, ((0, 0), (1, 0)))[:, :-1],
              lambda g: jnp.where(g >= jax.lax.top_k(g, 2)[0][:, 1:], g, 0)):  # fmt: skip
        rowwise(own(f)).init(4)  # warnings are errors here
    for tx, where in (
        (own(mean_over_rows), "mean_over_rows"), (own(lambda g: g[::-1]), "its update"),
        (own(lambda g: g.at[0].set(g[1])), "its update"), (own(lambda g: g.at[:, np.array([0, 0])].add(1)), "test_"),
        (own(lambda g, norm: g * norm, lambda p: jnp.linalg.norm(p)), "test_transf"),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match=f"kvjax: rows depend on each other in dense training by {where}"):
            rowwise(tx).init(4)
    raw = own(lambda g, key: g + jax.random.normal(key, g.shape), lambda params: jax.random.key_data(KEY))
    for tx in (own(lambda g: g + jax.random.normal(KEY, g.shape)), raw):
        with pytest.raises(ValueError, match=r"want a transform that draws no random numbers.*add_row_noise"):
            rowwise(tx).init(4)
    rowwise(own(lambda g: g @ jax.random.normal(KEY, (4, 4)))).init(4)  # the same for all rows of an array, too
    assert "(by" not in check_compatibility(own(lambda g: g / len(g)), 4).reason
    with pytest.raises(ValueError, match=r"whose update of an array \(1, 4\) has its shape, got \(4,\)"):
        check_compatibility(own(lambda g: g.sum(0)), 4)
    for f, shape in ((lambda g: g.sum(1), "2,"), (lambda g: g[:, :2], "2, 2")):
        with pytest.raises(ValueError, match=rf"whose update of an array \(2, 4\) has its shape, got \({shape}\)"):
            rowwise(own(f)).init(4)
    with pytest.raises(TypeError, match=r"want a transform that runs in jit, .* got one that raises TypeError: mul"):
        check_compatibility(own(lambda g: g * MASK), 4)


@pytest.mark.parametrize(("made", "got"), [
    (lambda g, s: (None, s), r"\(NoneType, state\)"), (lambda g, s: ({"g": g}, s), r"\(dict, state\)"),
    (lambda g, s: ("g", s), r"\(str, state\)"), (lambda g, s: None, "NoneType"), (lambda g, s: (g, s, s), "tuple"),
])  # fmt: skip
def test_updates_that_are_none_are_refused(made, got, make):
    tx = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: made(g, s))
    with pytest.raises(ValueError, match=rf"rowwise: want .* returns \(array, state\), got .*{got};"):
        make(4).apply(tx, kvjax.SparseRows(np.array([1]), jnp.ones((1, 4))))
    number = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (2.0, s))  # is for all elements
    assert make(1).apply(number, kvjax.SparseRows(np.array([1]), jnp.ones((1, 1))))[0].lookup(1) == 2


def test_the_warning_is_at_the_line_of_the_user(make):
    tx, table = optax.lamb(0.2), make(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_compatibility(tx, 2).verdict == "per row"  # which says so itself, and uses no warning up
    grads = kvjax.SparseRows(np.array([1]), jnp.ones((1, 2)))
    with pytest.warns(UserWarning, match="kvjax: rows depend") as seen:
        table, _ = table.apply(tx, grads)
    assert [one.filename for one in seen] == [__file__]
    with pytest.warns(UserWarning, match="kvjax: rows depend") as seen:
        kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.lamb(0.3)).init({"t": table})
    assert [one.filename for one in seen] == [__file__]


def test_what_is_no_transform_of_rows_is_refused():
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1))
    for whole in (tx, kvjax.optax.scale_loss(tx), kvjax.optax.accumulate(tx, 2)):
        found = check_compatibility(whole, 4)
        assert found.verdict == "refused" and "want the transform of a table's rows" in found.reason
        assert "give what partition got as tables=" in found.mend
    for dim in (0, -1, 2.0):
        with pytest.raises(ValueError, match=r"check_compatibility: want a dim of 1 or more, got"):
            check_compatibility(optax.sgd(0.1), dim)


def test_a_row_is_a_matrix_of_one_row(make):
    """What asks for the number of axes is answered as it is for a dense table."""
    masked = optax.adamw(0.1, weight_decay=0.5, mask=lambda params: params.ndim > 1)
    for tx in (optax.chain(optax.centralize(), optax.sgd(0.1)), masked):
        table = make(3, initializer=1.0)
        dense, grads = jnp.ones((2, 3)), jnp.arange(6.0).reshape(2, 3) ** 2
        state = tx.init(dense)
        for _ in range(2):
            table, _ = table.apply(tx, kvjax.SparseRows(np.arange(2), grads))
            updates, state = tx.update(grads, state, dense)
            dense = optax.apply_updates(dense, updates)
        np.testing.assert_allclose(table.lookup(np.arange(2)), dense, rtol=1e-6)
    assert table.export(slots=True).slots["mu"].shape == (2, 3)


def test_slots_are_kept_without_the_axis_of_rows():
    types = rowwise(optax.chain(optax.adam(0.1), optax.flatten(optax.sgd(0.1, 0.9)))).layout(5).type_texts
    assert types == {"count": "int32[]", "mu": "float32[5]", "nu": "float32[5]", "trace": "float32[5]"}
    with pytest.raises(ValueError, match="always has the same leaves"):
        rowwise(optax.masked(optax.trace(0.9), lambda params: params.shape[0] > 1)).init(4)


# ---- the page of all of optax ------------------------------------------------------------------------------


def line(name, found):
    if found.verdict == "refused":
        want = re.search(r"want (.*?), got", found.reason).group(1)
        return f"| `{name}` | refused | | | | | wants {want} | |"
    slots = ", ".join(leaf.type for leaf in found.leaves if leaf.kept == "slot") or "none"
    where = re.search(r"\(by (.*)\)", found.reason)
    mend = next(
        (x for x in ("catch_up", "joint", 'count="global"') if x in found.mend and "no closed" not in found.mend), ""
    )
    alone = " to ".join(f"{x:.1g}" for x in found.counts["auto"].reached)
    return (
        f"| `{name}` | {found.verdict} | {found.every_step:.1g} | {found.some_steps:.1g} | {alone} | {slots} "
        f"| {'rows meet in ' + where.group(1) if where else ''} | {mend} |"
    )


def page():
    head = PAGE.read_text().split("| transform |")[0] if PAGE.exists() else ""
    lines = ["| transform | verdict | every row | some rows | alone | slots of a row | why | mend |", "|---" * 8 + "|"]
    for name, tx in sorted(transforms().items(), key=lambda item: item[0].lower()):
        try:
            found = check(tx, 8)
        except TypeError:
            found = check(tx, 8, **EXTRA)
        lines.append(line(name, found))
    return head + "\n".join(lines) + "\n"


@slow
def test_all_of_optax_has_a_verdict():
    """To write the page anew: python -m tests.optax.test_compatibility"""
    got, want = (
        [text.split("|") for text in t.splitlines() if text.startswith("| `")] for t in (page(), PAGE.read_text())
    )
    assert len(got) > 120 and [g[1] for g in got] == [w[1] for w in want]
    for one, other in zip(got, want, strict=True):
        assert one[2] == other[2] and one[6:] == other[6:], (one, other)
        for x, y in zip(*("|".join(each[3:6]).replace(" to ", "|").split("|") for each in (one, other)), strict=True):
            assert x.strip() == y.strip() or math.isclose(float(x), float(y), rel_tol=0.3, abs_tol=1e-5), (one, other)


def test_the_page_says_what_is_so():
    """Of some of its lines, quickly."""
    lines, found = PAGE.read_text().splitlines(), transforms()
    for name in ("sgd", "muon", "clip_by_global_norm"):
        (want,) = [text for text in lines if text.startswith(f"| `{name}` |")]
        assert line(name, check(found[name], 8)).split("|")[2] == want.split("|")[2]


if __name__ == "__main__":
    PAGE.write_text(page())
