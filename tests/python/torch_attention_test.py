"""evenkeel.attention and its other doors (patch, FlashAttention's signature), on the CPU with any PyTorch."""
import pathlib
import threading
import unittest
import warnings

from torch_cases import TorchCase, drawn, evenkeel, exact, lower, main, torch, with_gradients

import torch.nn.functional as F  # noqa: E402
from evenkeel import _ops  # noqa: E402

BF16 = torch.bfloat16


class Attention(TorchCase):
    def test_is_the_formula_in_fp32(self):
        for T, N, H, G, D in ((1, 1, 1, 1, 1), (1, 7, 2, 2, 3), (65, 65, 4, 2, 24), (33, 97, 6, 1, 64), (97, 33, 2, 2, 40)):
            for causal in (False, True):
                x = drawn((2, H, T, D), (2, G, N, D), (2, G, N, D))
                visible = lower(T, N) if causal else None
                found = with_gradients(lambda *t: evenkeel.attention(*t, is_causal=causal), x)
                expected = with_gradients(lambda *t: exact(*t, visible), [t.detach().double().requires_grad_() for t in x])
                self.assert_near(found, expected, 1e-6, f"{T} {N} {H} {G} {D} {causal}")

    def test_gradcheck_of_the_definition_in_fp64(self):
        for H, G, causal, softcap in ((2, 2, False, 0.0), (2, 1, True, 0.0), (1, 1, True, 2.0)):
            x = drawn((1, H, 5, 4), (1, G, 6, 4), (1, G, 6, 4), dtype=torch.float64)
            run = lambda *t: evenkeel.attention(*t, is_causal=causal, softcap=softcap)
            self.assertTrue(torch.autograd.gradcheck(run, x))
        o = evenkeel.attention(*x)
        self.assertEqual(o.dtype, torch.float64)
        self.assert_near([o], [exact(*x)], 1e-14)

    def test_second_derivatives_are_refused(self):
        x = drawn((1, 1, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), dtype=torch.float64)
        (dq,) = torch.autograd.grad(evenkeel.attention(*x).sum(), x[:1], create_graph=True)
        with self.assertRaises(RuntimeError):
            torch.autograd.grad(dq.sum(), x[0])

    def test_any_strides_give_the_same_bits(self):
        plain = drawn((2, 3, 21, 8), (2, 3, 21, 8), (2, 3, 21, 8))
        d_o = torch.randn(2, 3, 21, 8)
        expected = with_gradients(lambda *t: evenkeel.attention(*t, is_causal=True), plain, d_o)
        ways = {
            "rows outermost": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
            "every second number": lambda t: torch.stack([t, t + 1], dim=-1)[..., 0],
            "transposed features": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
            "beginning at an odd place": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        }
        for name, way in ways.items():
            strange = [way(t.detach()).requires_grad_() for t in plain]
            found = with_gradients(lambda *t: evenkeel.attention(*t, is_causal=True), strange, way(d_o))
            for f, e in zip(found, expected):
                self.assertTrue(torch.equal(f, e), name)
        # One q for all sequences (a stride of 0), and one gradient for all numbers.
        q = plain[0].detach()[:1].expand(2, 3, 21, 8)
        self.assertTrue(torch.equal(evenkeel.attention(q, *plain[1:]), evenkeel.attention(q.contiguous(), *plain[1:])))
        evenkeel.attention(*plain).sum().backward()
        self.assertTrue(torch.isfinite(plain[0].grad).all())

    def test_masks_and_rows_that_see_nothing(self):
        x = drawn((2, 2, 9, 4), (2, 2, 7, 4), (2, 2, 7, 4))
        for shape in ((9, 7), (2, 1, 1, 7), (1, 2, 9, 7), (2, 2, 9, 7)):
            visible = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6
            visible[..., 0] = True
            self.assert_near(with_gradients(lambda *t: evenkeel.attention(*t, attn_mask=visible), x),
                             with_gradients(lambda *t: exact(*t, visible), x), 2e-6, str(shape))
        visible = torch.ones(9, 7, dtype=torch.bool)
        visible[4] = False
        o, dq, _, _ = with_gradients(lambda *t: evenkeel.attention(*t, attn_mask=visible), x)
        self.assertEqual(o[:, :, 4].abs().max().item() + dq[:, :, 4].abs().max().item(), 0)

    def test_plans_and_stabilisers(self):
        x = drawn((1, 2, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16))
        run = lambda **o: evenkeel.attention(*x, is_causal=True, **o)
        self.assertTrue(torch.equal(run(), run(plan="fp32")))
        self.assertFalse(torch.equal(run(), run(plan="flash2")))
        self.assert_near([run()], [run(plan="flash2")], 0.02)
        # A stabiliser goes in front of clauses for layers and heads.
        found = run(plan="fp32; layer 1 head 0: output=bf16", stabiliser="zero_sum", layer=1)
        self.assertFalse(torch.equal(found[:, 0], run()[:, 0]))
        self.assertTrue(torch.equal(found[:, 1], run()[:, 1]))
        o, lse = run(return_lse=True)
        scores = (x[0] @ x[1].transpose(-1, -2) / 4).masked_fill(~lower(40, 40), float("-inf"))
        self.assert_near([lse], [scores.logsumexp(-1)], 2e-6)
        # BF16: FlashAttention-2's roundings with the remedy, and BF16 results.
        narrow = [t.detach().to(BF16).requires_grad_() for t in x]
        found = with_gradients(lambda *t: evenkeel.attention(*t), narrow)
        self.assertTrue(all(t.dtype == BF16 for t in found))
        wide = with_gradients(lambda *t: exact(*t), [t.detach().float().requires_grad_() for t in narrow],
                              torch.randn(found[0].shape, generator=torch.Generator().manual_seed(2)).to(BF16).float())
        for f, e in zip(found, wide):
            self.assertLess((f.float() - e).norm() / e.norm(), 1e-2)

    def test_the_version_is_that_of_the_build(self):
        build = (pathlib.Path(__file__).resolve().parents[2] / "CMakeLists.txt").read_text()
        self.assertIn(f"project(evenkeel VERSION {evenkeel.__version__} ", build)

    def test_every_byte_for_backward_is_written(self):
        # Of a row as many, whatever the number of rows: the sizes of compiled code may be symbols.
        fresh = _ops._saved
        self.addCleanup(setattr, _ops, "_saved", fresh)
        options = (False, 0.0, 0.0, -1, -1, 0, 0)
        for plan in ("fp32", "flash2", "flash2,stabiliser=wide_output", "bf16_all,stabiliser=consistent",
                     "bf16_all; head 1: output_for_delta=fp32"):
            for B, T, N in ((1, 1, 1), (2, 37, 21), (1, 5, 130)):
                q, k = (t.detach() for t in drawn((B, 3, T, 5), (B, 3, N, 5)))
                saved = []
                for value in (0x55, 0xAA):
                    _ops._saved = lambda *arguments: fresh(*arguments).fill_(value)
                    saved.append(_ops.forward_op(q, k, k, None, None, None, None, plan, *options)[2])
                self.assertTrue(torch.equal(*saved), f"{plan} {B} {T} {N}")
                asked, _ = _ops._sizes(q, (B, 3, 3, T, N, 5, 5), _ops.Forms(), (plan, *options, 0))
                self.assertEqual((tuple(saved[0].shape[:3]), saved[0].numel()), ((B, 3, T), asked))

    def test_facts(self):
        q, k, v, d_o = (t.detach() for t in drawn(*[(2, 2, 24, 8)] * 4))
        told = evenkeel.attention_facts(q, k, v, d_o, is_causal=True, plan="bf16_all")
        mended = evenkeel.attention_facts(q, k, v, d_o, is_causal=True, plan="bf16_all", stabiliser="zero_sum")
        self.assertEqual(told["ties"].shape, (2, 2, 24))
        self.assertTrue((told["ties"] >= 1).all() and (told["residual_floor"] >= 0).all())
        self.assertLess(mended["residual"].abs().mean(), 0.3 * told["residual"].abs().mean())
        self.assertEqual(evenkeel.kernel_choice(q, k, v)[0], "cpu")

    def test_autocast(self):
        x = drawn((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4))
        with torch.autocast("cpu", dtype=BF16):
            o = evenkeel.attention(*x)
            in_fp64 = evenkeel.attention(*[t.double() for t in x])
        self.assertEqual(o.dtype, BF16)
        self.assertEqual(in_fp64.dtype, torch.float64)
        o.float().sum().backward()
        self.assertEqual(x[0].grad.dtype, torch.float32)

    def test_threads(self):
        problems = []
        for n, (T, plan) in enumerate(((33, "fp32"), (64, "flash2"), (17, "bf16_all"), (50, "fp32,row_sum=e5m2"))):
            x = drawn((2, 2, T, 16), (2, 2, T, 16), (2, 2, T, 16), seed=n)
            run = lambda x=x, plan=plan: with_gradients(lambda *t: evenkeel.attention(*t, is_causal=True, plan=plan), x)
            problems.append((run, run()))
        wrong = []

        def work(number):
            for turn in range(12):
                run, expected = problems[(number + turn) % len(problems)]
                try:
                    if not all(torch.equal(f, e) for f, e in zip(run(), expected)):
                        wrong.append(f"thread {number}, turn {turn}: other bits")
                    # An error of one thread does not show in another.
                    evenkeel.attention(torch.zeros(1, 1, 1, 1), *[torch.zeros(1, 1, 1, 1)] * 2, plan=f"bad{number}")
                except ValueError as error:
                    if f"bad{number}" not in str(error):
                        wrong.append(str(error))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_bad_input_is_told(self):
        q, k, v = (t.detach() for t in drawn((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)))
        run = lambda *t, **o: lambda: evenkeel.attention(*t, **o)
        name = "evenkeel.attention: expected"
        self.assert_says(TypeError, run(*(t.to(torch.complex64) for t in (q, k, v))), name, "float32", "found complex64")
        self.assert_says(TypeError, run(q.long(), k.long(), v.long()), name, "found int64")
        self.assert_says(TypeError, run(q, k.double(), v), name, "one dtype", "float64")
        self.assert_says(TypeError, run(q, None, v), name, "k to be a tensor", "NoneType")
        self.assert_says(TypeError, run([1], k, v), name, "q to be a tensor", "list")
        self.assert_says(TypeError, run(q.to_sparse(), k, v), name, "strided", "sparse")
        self.assert_says(ValueError, run(q[0], k, v), name, "4 axes", "(4, 5, 8)")
        self.assert_says(ValueError, run(q.to("meta"), k.to("meta"), v.to("meta")), name, "CPU or a CUDA", "meta")
        self.assert_says(ValueError, run(q, k.to("meta"), v), name, "one device", "meta")
        self.assert_says(ValueError, run(q, k, v[:, :, :5]), name, "as many heads and keys", "(2, 2, 5, 8)")
        self.assert_says(ValueError, run(q, k, v, sinks=torch.zeros(2)), name, "sinks of 4 numbers", "(2,)")
        self.assert_says(ValueError, run(q, k, v, alibi_slopes=[1]), name, "alibi_slopes of 4 numbers", "list")
        self.assert_says(ValueError, run(q, k, v, alibi_slopes=torch.zeros(4), softcap=2.0), "evenkeel.attention", "softcap")
        self.assert_says(ValueError, run(q, k[..., :4], v[..., :4]), name, "8", "(2, 2, 6, 4)")
        self.assert_says(ValueError, run(q[:1], k, v), name, "(2, 2, 6, 8)")
        self.assert_says(ValueError, run(q[:, :3], k, v), name, "whole groups", "3 query heads")
        self.assert_says(ValueError, run(q[:, :, :0], k, v), name, "no empty axis", "(2, 4, 0, 8)")
        self.assert_says(ValueError, run(q, k, v, plan="bf17"), "evenkeel.attention", "bf17", "expected")
        self.assert_says(ValueError, run(q, k, v, stabiliser="magic"), "evenkeel.attention", "magic")
        self.assert_says(ValueError, run(q, k, v, plan="fp32; head 9x: output=bf16"), "evenkeel.attention", "9x")
        self.assert_says(ValueError, run(q, k, v, scale=0.0), "evenkeel.attention", "scale other than 0", "found 0.0")
        self.assert_says(ValueError, run(q, k, v, scale=float("nan")), "evenkeel.attention", "finite scale", "nan")
        self.assert_says(ValueError, run(q, k, v, softcap=-1.0), "evenkeel.attention", "softcap", "-1")
        self.assert_says(ValueError, run(q.double(), k.double(), v.double(), plan="flash2"), "rounds nothing", "flash2")
        mask = torch.ones(5, 6, dtype=torch.bool)
        self.assert_says(TypeError, run(q, k, v, attn_mask=mask.float()), name, "bool", "float32")
        self.assert_says(TypeError, run(q, k, v, attn_mask=[1]), name, "attn_mask to be a tensor", "list")
        self.assert_says(ValueError, run(q, k, v, attn_mask=mask[:3]), name, "broadcasts to (2, 4, 5, 6)", "(3, 6)")
        self.assert_says(ValueError, run(q, k, v, attn_mask=mask, is_causal=True), name, "found both")
        self.assert_says(ValueError, run(q, k, v, step=torch.tensor(1)), name, "step", "int64")
        self.assert_says(ValueError, lambda: evenkeel.attention_facts(q, k, v, q[:1]), "attention_facts: expected",
                         "grad_output")


class FlashAttention(TorchCase):
    def test_its_layout_and_its_corner(self):
        q, k, v = drawn((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
        swapped = [t.transpose(1, 2) for t in (q, k, v)]
        visible = torch.ones(5, 9, dtype=torch.bool).tril(4)  # the last row sees the last key
        self.assert_near([evenkeel.flash_attn_func(q, k, v, causal=True)],
                         [exact(*swapped, visible).transpose(1, 2)], 1e-6)
        band = visible & torch.ones(5, 9, dtype=torch.bool).triu(4 - 2)
        o, lse, nothing = evenkeel.flash_attn_func(q, k, v, causal=True, window_size=(2, 0), softmax_scale=0.3,
                                                   return_attn_probs=True)
        self.assert_near([o], [exact(*swapped, band, 0.3).transpose(1, 2)], 1e-6)
        self.assertEqual((tuple(lse.shape), nothing), ((2, 4, 5), None))


class Patch(TorchCase):
    def test_patched_equals_unpatched(self):
        from train_nano import Gpt

        tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))

        def loss_and_gradients():
            torch.manual_seed(1)
            model = Gpt()
            loss = model(tokens, tokens)
            return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

        def plain(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
            return exact(q, k, v, lower(q.shape[2], k.shape[2]) if is_causal else None)

        here = hasattr(F, "scaled_dot_product_attention")
        if not here:
            F.scaled_dot_product_attention = plain
            self.addCleanup(delattr, F, "scaled_dot_product_attention")
        before = F.scaled_dot_product_attention
        expected = loss_and_gradients()
        with evenkeel.patched():
            self.assertIsNot(F.scaled_dot_product_attention, before)
            self.assert_near(loss_and_gradients(), expected, 1e-6)
            inner = F.scaled_dot_product_attention
            with evenkeel.patched(plan="flash2"):
                self.assertFalse(torch.equal(loss_and_gradients()[0], expected[0]))
            self.assertIs(F.scaled_dot_product_attention, inner)
        self.assertIs(F.scaled_dot_product_attention, before)
        self.assert_says(RuntimeError, evenkeel.unpatch, "expected a patch()")

    def test_what_is_not_taken_falls_back_with_one_warning(self):
        calls = []

        def own(*arguments, **options):
            calls.append(options)
            return arguments[0]

        here = getattr(F, "scaled_dot_product_attention", None)
        F.scaled_dot_product_attention = own
        try:
            with evenkeel.patched():
                q = torch.randn(1, 2, 3, 4)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    for _ in range(2):
                        F.scaled_dot_product_attention(q, q, q, dropout_p=0.25)
                        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(3, 3))
                        F.scaled_dot_product_attention(*[q.to(torch.complex64)] * 3)
                        F.scaled_dot_product_attention(q, q[:, :1], q[:, :1])
                    self.assertEqual(len(calls), 8)
                    words = [str(w.message) for w in caught]
                    self.assertEqual(len(words), 4, words)
                    self.assertIn("goes to PyTorch's own: expected dropout_p of 0, found 0.25", words[0])
                    self.assertTrue(any("complex64" in w for w in words) and any("enable_gqa" in w for w in words), words)
                self.assertEqual(calls[0], {"attn_mask": None, "dropout_p": 0.25, "is_causal": False})
                # And what is taken: three axes, a mask of bool, groups of heads, a scale.
                flat = torch.randn(2, 5, 4)
                self.assert_near([F.scaled_dot_product_attention(flat, flat, flat)],
                                 [exact(flat.unsqueeze(1), flat.unsqueeze(1), flat.unsqueeze(1)).squeeze(1)], 1e-6)
                self.assert_near([F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], scale=0.7, enable_gqa=True)],
                                 [exact(q, q[:, :1], q[:, :1], scale=0.7)], 1e-6)
                self.assert_near([F.scaled_dot_product_attention(q, q, q, attn_mask=lower(3, 3))],
                                 [exact(q, q, q, lower(3, 3))], 1e-6)
                self.assertEqual(len(calls), 8)
        finally:
            if here is None:
                del F.scaled_dot_product_attention
            else:
                F.scaled_dot_product_attention = here

    @unittest.skipIf(hasattr(F, "scaled_dot_product_attention"), "this torch has the function itself")
    def test_without_an_original_the_reason_is_an_error(self):
        with evenkeel.patched():
            q = torch.randn(1, 2, 3, 4)
            self.assert_says(ValueError, lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), "dropout_p",
                             "fall back")
        self.assertFalse(hasattr(F, "scaled_dot_product_attention"))


if __name__ == "__main__":
    main()
