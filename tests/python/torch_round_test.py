"""evenkeel.round against formats written out in full, against `evenkeel explain`, and against the roundings inside attention."""
import ctypes
import itertools
import json
import math
import subprocess
import unittest

from torch_cases import TorchCase, drawn, evenkeel, exact, lower, main, torch, with_gradients

from evenkeel import _library, _program  # noqa: E402

try:
    PROGRAM = _program.program_path()
except evenkeel.EvenkeelError:
    PROGRAM = None


def magnitudes(exponent_bits, significand_bits, bias=None, codes_lost=0):
    """Every magnitude of a small format in the order of its codes, by its definition. codes_lost: at the top, for Inf and NaN."""
    bias = 2 ** (exponent_bits - 1) - 1 if bias is None else bias
    found = []
    for code in range(2 ** (exponent_bits + significand_bits) - codes_lost):
        field, rest = divmod(code, 2**significand_bits)
        found.append(math.ldexp(rest if field == 0 else 2**significand_bits + rest, max(field, 1) - bias - significand_bits))
    return found


# Name, every magnitude, and what lies half a step beyond the largest.
FORMATS = (("e4m3", magnitudes(4, 3, codes_lost=1), math.nan), ("e5m2", magnitudes(5, 2, codes_lost=4), math.inf),
           ("e2m3", magnitudes(2, 3), 7.5), ("e3m2", magnitudes(3, 2), 28.0), ("e2m1", magnitudes(2, 1), 6.0),
           ("int4", [float(n) for n in range(8)], 7.0), ("int8", [float(n) for n in range(128)], 127.0),
           ("e3m4", magnitudes(3, 4, codes_lost=16), math.inf))


def after(x):
    return torch.nextafter(x, torch.full_like(x, math.inf))


def before(x):
    return torch.nextafter(x, torch.full_like(x, -math.inf))


class Round(TorchCase):
    def test_every_number_of_small_formats_and_every_middle(self):
        for name, values, beyond in FORMATS:
            with self.subTest(name):
                numbers = torch.tensor(values)
                self.assertTrue(torch.equal(evenkeel.round(numbers, name), numbers))
                low, high = numbers[:-1], numbers[1:]
                middle = (low + high) / 2  # exact: the formats have few bits
                even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)  # the code that ends with a zero
                for x, expected in ((middle, even), (before(middle), low), (after(middle), high)):
                    self.assertTrue(torch.equal(evenkeel.round(x, name), expected))
                    self.assertTrue(torch.equal(evenkeel.round(-x, name), -expected))
                for mode, expected in (("toward_zero", low), ("nearest_away", high), ("up", high), ("down", low)):
                    self.assertTrue(torch.equal(evenkeel.round(middle, f"{name}/{mode}"), expected), mode)
                top = torch.tensor([values[-1] + (values[-1] - values[-2]), -math.inf, math.nan])
                found = evenkeel.round(top, name)
                self.assertTrue(torch.equal(found[:1], torch.tensor([beyond])) or math.isnan(beyond) and math.isnan(found[0]))
                self.assertTrue(math.isnan(found[2]))
                self.assertEqual(evenkeel.round(top, f"{name}/saturate")[:2].tolist(), [values[-1], -values[-1]])

    def test_bf16_and_fp16_are_pytorchs(self):
        x = torch.cat([torch.randn(100000) * 10.0 ** torch.randint(-12, 12, (100000,)), torch.tensor([0.0, -0.0, math.inf, 65520.0])])
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
            self.assertTrue(torch.equal(evenkeel.round(x, name), x.to(dtype).float()), name)

    @unittest.skipUnless(PROGRAM, "needs the program")
    def test_shared_scales_as_the_program_explains_them(self):
        x = torch.randn(40, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 1, 40)
        for text in ("int8*row", "int4*row", "e2m1*block32@e8m0_up", "e2m1*block16@e4m3*row", "e4m3*block32@e8m0", "hif8*row",
                     "int8*row/toward_zero", "e2m1*block16@e4m3*tensor", "e4m3*block16"):
            done = subprocess.run([PROGRAM, "explain", *[f"{one:.9g}" for one in x.tolist()], "--to", text, "--json"],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            expected = [value["becomes"] for block in json.loads(done.stdout)["blocks"] for value in block["values"]]
            self.assertEqual(evenkeel.round(x, text).tolist(), expected, text)

    @unittest.skipUnless(PROGRAM, "needs the program")
    def test_stochastic_rounding_draws_as_the_program_does(self):
        for seed, value in itertools.product((0, 5, 2**31), (0.31, -1.03)):
            done = subprocess.run([PROGRAM, "explain", f"{value}", "--to", "e4m3/stochastic", "--seed", str(seed), "--json"],
                                  capture_output=True, text=True)
            self.assertEqual(evenkeel.round(torch.tensor([value]), "e4m3/stochastic", seed=seed).item(), json.loads(done.stdout)["value"])

    def test_stochastic_rounding_has_a_seed_and_no_bias(self):
        x = torch.full((200, 100), 1.03)  # between 1 and 1.125 of E4M3
        once = evenkeel.round(x, "e4m3/stochastic", seed=7)
        self.assertEqual(set(once.unique().tolist()), {1.0, 1.125})
        self.assertAlmostEqual(once.mean().item(), 1.03, delta=4 * 0.0535 / 200000**0.5 * 10**0.5)
        self.assertTrue(torch.equal(once, evenkeel.round(x, "e4m3/stochastic", seed=7)))
        self.assertFalse(torch.equal(once, evenkeel.round(x, "e4m3/stochastic", seed=8)))
        few = x[:120].flatten()[:120]  # element n draws number n, whatever the axes are
        self.assertTrue(torch.equal(evenkeel.round(few.view(2, 3, 4, 5), "e4m3/stochastic", seed=7).flatten(),
                                    evenkeel.round(few, "e4m3/stochastic", seed=7)))
        torch.manual_seed(1)
        drawn_once, drawn_twice = (evenkeel.round(x, "e4m3/stochastic") for _ in range(2))
        self.assertFalse(torch.equal(drawn_once, drawn_twice))
        torch.manual_seed(1)
        self.assertTrue(torch.equal(drawn_once, evenkeel.round(x, "e4m3/stochastic")))
        state = torch.get_rng_state()
        evenkeel.round(x, "e4m3")  # draws none
        self.assertTrue(torch.equal(state, torch.get_rng_state()))

    def test_who_shares_a_scale(self):
        B, H, T, D = 2, 3, 130, 48
        x = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(4)) * torch.logspace(-1, 1, D)
        step = lambda largest: (largest / 127).float()
        groups = {"row": x.abs().amax(-1, keepdim=True), "head": x.abs().amax((-1, -2), keepdim=True),
                  "tensor": x.abs().amax((1, 2, 3), keepdim=True), "column": x.abs().amax(-2, keepdim=True),
                  "tile": torch.cat([part.abs().amax((-1, -2), keepdim=True).expand(-1, -1, part.shape[2], -1) for part in x.split(64, 2)], 2),
                  "column32": torch.cat([part.abs().amax(-2, keepdim=True).expand(-1, -1, part.shape[2], -1) for part in x.split(32, 2)], 2),
                  "block32": torch.cat([part.abs().amax(-1, keepdim=True).expand(*part.shape) for part in x.split(32, 3)], 3)}
        for group, largest in groups.items():
            expected = (x / step(largest)).round().clamp(-127, 127) * step(largest)
            self.assertTrue(torch.equal(evenkeel.round(x, f"int8*{group}"), expected), group)
        # Fewer axes are the last ones, more are sequences.
        for shape in ((T, D), (H, T, D), (1, B, H, T, D)):
            part = x.reshape(-1)[: math.prod(shape)].view(shape)
            as_four = part.view(-1, H if len(shape) > 2 else 1, T, D)
            for group in groups:
                self.assertTrue(torch.equal(evenkeel.round(part, f"int8*{group}").view(as_four.shape),
                                            evenkeel.round(as_four, f"int8*{group}")), (shape, group))

    def test_rounds_as_attention_does(self):
        # Attention whose operands are rounded outside it is attention whose plan rounds them.
        q, k, v = (t.detach() for t in drawn((2, 2, 70, 32), (2, 2, 70, 32), (2, 2, 70, 32)))
        for text in ("e4m3", "int8*row", "e2m1*block16@e4m3*tensor", "e4m3*head", "int4*column32", "int8*tile", "e5m2/toward_zero"):
            inside = evenkeel.attention(q, k, v, is_causal=True, plan=f"fp32,q={text},k={text},v={text}")
            outside = evenkeel.attention(*(evenkeel.round(t, text) for t in (q, k, v)), is_causal=True, plan="fp32")
            self.assertTrue(torch.equal(inside, outside), text)

    def test_attention_by_any_plan_has_gradients(self):
        # In FP32 those of the formula; with coarse operands those of the rounded operands, since a rounding has none.
        x = drawn((1, 2, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16))
        double = [t.detach().double().requires_grad_() for t in x]
        formula = with_gradients(lambda *t: exact(*t, lower(40, 40)), double)
        self.assert_near(with_gradients(lambda *t: evenkeel.attention(*t, is_causal=True, plan="fp32"), x), formula, 1e-6)
        rounded = [evenkeel.round(t.detach(), "e4m3").double().requires_grad_() for t in x]
        formula = with_gradients(lambda *t: exact(*t, lower(40, 40)), rounded)
        found = with_gradients(lambda *t: evenkeel.attention(*t, is_causal=True, plan="fp32,q=e4m3,k=e4m3,v=e4m3"), x)
        self.assert_near(found, formula, 1e-6)
        # With every site of a paper's plan rounded: near the formula, and not the formula.
        found = with_gradients(lambda *t: evenkeel.attention(*t, is_causal=True, plan="nvfp4,stabiliser=zero_sum"), x)
        self.assert_near(found, with_gradients(lambda *t: exact(*t, lower(40, 40)), double), 0.5)
        self.assertFalse(torch.allclose(found[1], formula[1].float(), atol=1e-3))

    def test_any_strides_and_no_numbers(self):
        x = torch.randn(6, 8, 10)
        whole = x.clone()
        for way in (x.transpose(0, 2), x[:, ::2], x[..., 1:9:3], x[:1].expand(5, 8, 10), x.permute(1, 2, 0), torch.tensor(1.03)):
            for text in ("e4m3", "int8*row"):
                found = evenkeel.round(way, text)
                self.assertEqual(found.shape, way.shape)
                self.assertTrue(torch.equal(found, evenkeel.round(way.contiguous(), text)))
        self.assertTrue(torch.equal(x, whole))  # given tensors stay as they are
        for shape in ((0,), (3, 0), (0, 3), (2, 0, 3, 4), (0, 0, 0, 0, 0)):
            for text in ("e4m3", "int8*row", "int8*column", "int8*tile", "e2m1*block16@e4m3*tensor"):
                self.assertEqual(evenkeel.round(torch.zeros(shape), text).shape, shape)

    def test_what_is_not_finite(self):
        x = torch.tensor([[1.0, math.nan, 3.0, math.inf], [math.nan] * 4, [0.0, -0.0, 0.0, 0.0]])
        found = evenkeel.round(x, "int8*row")
        self.assertTrue(torch.equal(found.isnan(), x.isnan()))
        self.assertEqual(found[0, 3].item(), 3.0)  # the largest number
        self.assertEqual(found[2].tolist(), [0.0] * 4)
        self.assertTrue(torch.signbit(found[2, 1]))

    def test_says_what_was_expected(self):
        x = torch.zeros(2, 2)
        round_it = lambda *arguments, **options: lambda: evenkeel.round(*arguments, **options)
        self.assert_says(ValueError, round_it(x, "e9m9x"), "evenkeel.round", "expected", "e9m9x")
        self.assert_says(ValueError, round_it(x, "int8*rows"), "evenkeel.round", "expected", "rows")
        self.assert_says(ValueError, round_it(x, ""), "evenkeel.round", "expected")
        self.assert_says(ValueError, round_it(x, "e4m3/sideways"), "evenkeel.round", "sideways")
        for wrong in (x.double(), x.bfloat16(), x.int(), x.to("meta"), x.to_sparse()):
            self.assert_says(ValueError, round_it(wrong, "e4m3"), "evenkeel.round: expected", "float32", "found", str(wrong.dtype))
        self.assert_says(TypeError, round_it([1.0], "e4m3"), "expected a tensor", "list")
        self.assert_says(TypeError, round_it(x, None), "expected a format", "NoneType")
        self.assert_says(TypeError, round_it(x, torch.float16), "expected a format", "dtype")
        for seed in (-1, 2**64, 1.5, "1"):
            self.assert_says(ValueError, round_it(x, "e4m3", seed=seed), "expected a seed", str(seed))
        needs = torch.zeros(2, requires_grad=True)
        self.assert_says(ValueError, round_it(needs, "e4m3"), "no gradient", "x.detach()")
        with torch.no_grad():
            self.assertFalse(evenkeel.round(needs, "e4m3").requires_grad)


class CInterface(TorchCase):
    """What the package itself never asks for."""

    def status(self, x=None, y=None, size=None, text=b"e4m3", shape=(1, 1, 1, 2), seed=0, request=True):
        x, y = (t if t is None else t.data_ptr() for t in (x, y))
        rounding = _library.Rounding(ctypes.sizeof(_library.Rounding) if size is None else size, text, *shape, seed)
        return _library.library().evenkeel_round(ctypes.byref(rounding) if request else None, x, y)

    def test_bad_arguments_are_refused(self):
        x, y = torch.tensor([1.03, 2.0]), torch.zeros(2)
        self.assertEqual(self.status(x, y), 0)
        self.assertEqual(y.tolist(), [1.0, 2.0])
        self.assertEqual(self.status(y, y), 0)  # in place
        older = _library.Rounding.seed.offset
        self.assertEqual(self.status(x, y, size=older, text=b"e4m3/stochastic", seed=1), 0)  # without a seed: 0
        self.assertTrue(torch.equal(y, evenkeel.round(x, "e4m3/stochastic", seed=0)))
        for wrong in (dict(request=False), dict(size=older - 1), dict(size=2**20), dict(text=None), dict(text=b"e4"), dict(shape=(1, 1, -1, 2)),
                      dict(shape=(2**20, 2**20, 2**20, 2**20)), dict(x=None), dict(y=None)):
            self.assertEqual(self.status(**{"x": x, "y": y, **wrong}), _library.BAD_ARGUMENT, wrong)
            self.assertIn("expected", _library.library().evenkeel_last_error().decode())
        self.assertEqual(self.status(None, None, shape=(1, 0, 2, 2)), 0)


if __name__ == "__main__":
    main()
