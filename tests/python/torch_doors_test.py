"""Every door to evenkeel's attention, on the CPU with any PyTorch: right answers or a refusal in words, what coverage() says,
random draws. Interfaces of newer PyTorch, of transformers and of DTensor are met as small stand-ins of their signatures."""
import contextlib
import sys
import types
import unittest
import unittest.mock
import warnings

from torch_cases import TorchCase, drawn, evenkeel, exact, lower, main, torch, with_gradients

import torch.nn.functional as F  # noqa: E402
from evenkeel import _attention, _coverage, _ops, _plain, _recording, flash_attn, hf  # noqa: E402

BF16 = torch.bfloat16


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


class DoorCase(TorchCase):
    def setUp(self):
        _coverage._warned.clear()
        _coverage._calls.clear()

    def stand_in(self, name, **members):
        """A module of this name for the time of the test."""
        module, before = types.ModuleType(name), sys.modules.get(name)
        for key, value in members.items():
            setattr(module, key, value)
        sys.modules[name] = module
        self.addCleanup(lambda: sys.modules.pop(name) if before is None else sys.modules.__setitem__(name, before))
        return module

    def original(self, fn):
        """fn as torch's own scaled_dot_product_attention."""
        before = getattr(F, "scaled_dot_product_attention", None)
        F.scaled_dot_product_attention = fn
        self.addCleanup(lambda: delattr(F, "scaled_dot_product_attention") if before is None
                        else setattr(F, "scaled_dot_product_attention", before))


class Draws(DoorCase):
    def test_differ_by_call_and_repeat_from_a_seed(self):
        x = drawn(*[(1, 2, 20, 8)] * 3)
        run = lambda **o: evenkeel.attention(*x, plan="fp32,output=e5m2/stochastic", **o)
        torch.manual_seed(5)
        first, second = run(), run()
        self.assertFalse(torch.equal(first, second))
        torch.manual_seed(5)
        self.assertTrue(torch.equal(first, run()) and torch.equal(second, run()))
        self.assertTrue(torch.equal(run(step=3), run(step=3)))
        self.assertTrue(torch.equal(run(step=3), run(step=torch.tensor([3], dtype=torch.int32))))
        before = torch.get_rng_state()  # a plan that draws nothing leaves PyTorch's generator alone
        evenkeel.attention(*x, plan="flash2")
        self.assertTrue(torch.equal(before, torch.get_rng_state()))
        for plan, expected in (("flash2", False), ("flash2,stabiliser=wide_output", True), ("fp32,stabiliser=dither", True),
                               ("bf16_all,stabiliser=zero_sum", False), ("fp32; layer 1: output=bf16", True)):
            self.assertEqual(_attention.draws(plan), expected, plan)
        self.assert_says(ValueError, lambda: _attention.draws("bf17"), "bf17")

    def test_a_checkpointed_layer_draws_the_same_again(self):
        from torch.utils.checkpoint import checkpoint

        x = drawn(*[(1, 1, 16, 8)] * 3)
        run = lambda *t: evenkeel.attention(*t, plan="fp32,output=e5m2/stochastic")
        results = []
        for through in (run, lambda *t: checkpoint(run, *t, use_reentrant=False)):
            torch.manual_seed(7)
            results.append(with_gradients(through, x, torch.ones(1, 1, 16, 8)))
        for a, b in zip(*results):
            self.assertTrue(torch.equal(a, b))


class LogSumExp(DoorCase):
    def test_its_gradient(self):
        for causal, mask in ((True, None), (False, None), (False, torch.rand(9, 9) < 0.5)):
            x = drawn((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
            d_o, d_l = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9)
            if mask is not None:
                mask[:, 0] = True
            visible = lower(9, 9) if causal else mask
            o, lse = evenkeel.attention(*x, is_causal=causal, attn_mask=mask, return_lse=True)
            found = torch.autograd.grad([o, lse], x, [d_o, d_l])
            o, lse = _plain.plain_attention(*x, visible)
            self.assert_near(found, torch.autograd.grad([o, lse], x, [d_o, d_l]), 3e-6)
            lse = evenkeel.attention(*x, is_causal=causal, attn_mask=mask, return_lse=True)[1]
            plain = _plain.plain_attention(*x, visible)[1]
            self.assert_near(torch.autograd.grad(lse, x[:2], d_l), torch.autograd.grad(plain, x[:2], d_l), 3e-6)

    def test_with_softcap_by_the_kernels_alone(self):
        x, d_l = drawn(*[(1, 1, 4, 4)] * 3), torch.randn(1, 1, 4)
        lse = evenkeel.attention(*x, softcap=2.0, return_lse=True)[1]
        plain = _plain.plain_attention(*x, softcap=2.0)[1]
        self.assert_near(torch.autograd.grad(lse, x[:2], d_l), torch.autograd.grad(plain, x[:2], d_l), 3e-6)
        with unittest.mock.patch.object(_ops, "takes_grad_lse", lambda *_: False):
            lse = evenkeel.attention(*x, softcap=2.0, return_lse=True)[1]
            self.assert_says(NotImplementedError, lambda: lse.sum().backward(), "softcap")
            self.test_its_gradient()  # and by two more passes
            Packed("test_is_each_sequence_by_itself").test_is_each_sequence_by_itself()

    def test_context_parallel_keys_in_two_parts(self):
        q, k, v = drawn((1, 2, 12, 8), (1, 2, 20, 8), (1, 2, 20, 8))

        def in_parts(q, k, v):
            parts = [evenkeel.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 7), (7, 20))]
            both = torch.logaddexp(parts[0][1], parts[1][1])
            return sum(o * (lse - both).exp().unsqueeze(-1) for o, lse in parts)

        self.assert_near(with_gradients(in_parts, (q, k, v)), with_gradients(exact, (q, k, v)), 3e-6)


class Forms(DoorCase):
    """Slopes, sinks, values with another head size, FP16; batched and packed, all gradients, the log-sum-exp's too."""

    def compare(self, run, plain, x, tolerance=4e-6):
        """Both return o and lse."""
        draw, results = torch.Generator().manual_seed(4), []
        for fn in (run, plain):
            o, lse = fn(*x)
            draw.manual_seed(4)
            d_o, d_l = (torch.randn(t.shape, generator=draw).to(t.dtype) for t in (o, lse))
            results.append([o, lse, *torch.autograd.grad([o, lse], x, [d_o, d_l])])
        self.assert_near(*results, tolerance)

    def test_slopes_sinks_and_other_values(self):
        slopes, sinks = torch.tensor([0.5, 0.1, 0.0, 1.0]), torch.tensor([0.3, -2.0, 1.0, 4.0]).requires_grad_()
        for D_v in (8, 5, 12):
            x = [*drawn((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, D_v)), sinks]
            visible = torch.ones(6, 9, dtype=torch.bool).tril(3)
            run = lambda q, k, v, s: _attention.run("it", q, k, v, True, slopes=slopes, sinks=s)
            plain = lambda q, k, v, s: _plain.plain_attention(q, k, v, visible, _plain.alibi_bias(slopes, 6, 9), sinks=s)
            self.compare(run, plain, x)
            narrow = lambda *t: evenkeel.attention(*t[:3], sinks=t[3], return_lse=True)
            self.compare(narrow, lambda *t: _plain.plain_attention(*t[:3], sinks=t[3]), x)
            with unittest.mock.patch.object(_attention, "taken_by_a_kernel", lambda *_, **o: False):  # beside the kernels
                self.compare(narrow, lambda *t: _plain.plain_attention(*t[:3], sinks=t[3]), x)
        self.assertEqual({call["kernel"] for call in evenkeel.coverage()}, {"cpu"})
        wrong = lambda q, k, v, s: plain(q, k, v, s + 0.01)  # the test of the test
        self.assertRaises(AssertionError, lambda: self.compare(run, wrong, x))

    def test_packed(self):
        slopes, sinks = torch.tensor([0.5, 0.1, 0.0, 1.0]), torch.tensor([0.3, -2.0, 1.0, 4.0]).requires_grad_()
        rows = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
        for D_v in (8, 6):
            x = [*drawn((8, 4, 8), (8, 2, 8), (8, 2, D_v)), sinks]

            def plain(q, k, v, s):
                parts = []
                for a, b in ((0, 3), (3, 8)):
                    part = [t[a:b].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
                    o, lse = _plain.plain_attention(*part, lower(b - a, b - a), _plain.alibi_bias(slopes, b - a, b - a), sinks=s)
                    parts.append((o[0].transpose(0, 1), lse[0]))
                return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1)

            run = lambda q, k, v, s: _attention.run_packed("it", q, k, v, rows, rows, 5, 5, True, slopes=slopes, sinks=s)
            self.compare(run, plain, x)

    def test_halves(self):
        x = drawn((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), dtype=torch.float16)
        self.compare(lambda *t: evenkeel.attention(*t, is_causal=True, return_lse=True),
                     lambda *t: _plain.plain_attention(*t, lower(6, 6)), x, 4e-3)
        choice = lambda *t, **o: evenkeel.attention(*t, step=0, **o)
        wide = [t.float() for t in x]
        sites = "flash2" + "".join(f",{s}=fp16" for s in ("probs", "output", "probs_bwd", "dscores", "dq", "dk", "dv"))
        self.assertTrue(torch.equal(choice(*x, plan="flash2").float(), choice(*wide, plan=sites)))
        self.assertFalse(torch.equal(choice(*x, plan="flash2").float(), choice(*wide, plan="flash2")))
        self.assertEqual(_ops.in_format("flash2,keel=1; head 1: output=fp32", torch.float16),
                         sites + ",keel=1; head 1: output=fp32")
        self.assertEqual(_ops.in_format("flash2", BF16), "flash2")

    def test_larger_heads_are_asked_for_with_their_plan(self):
        """On a GPU, which need not be here: tensors that say so."""

        class OnGpu(torch.Tensor):
            device = property(lambda self: torch.device("cuda", 0))

        asked = []
        refuse = lambda *call: asked.append(call) or ("no" if "float32" in call or "bf16_all" in call else "")
        with unittest.mock.patch.object(_attention, "refusal", refuse), \
                unittest.mock.patch.object(_attention, "unsuited_gpu", lambda _: None):
            made = lambda D, D_v, dtype=BF16: [torch.zeros(1, 2, 4, d, dtype=dtype).as_subclass(OnGpu) for d in (D, D, D_v)]
            self.assertIsNone(_attention.unsuited(*made(128, 64)))
            self.assertEqual(asked, [])  # every family takes these
            for D, D_v in ((192, 128), (256, 256), (64, 136)):
                self.assertIsNone(_attention.unsuited(*made(D, D_v), stabiliser="zero_sum"))
                self.assertEqual(asked[-1], (0, "bfloat16", 2, max(D, D_v), "flash2,stabiliser=zero_sum", False, False))
            self.assertEqual(_attention.unsuited(*made(192, 192, torch.float32)), (ValueError, "no"))
            self.assertEqual(_attention.unsuited(*made(192, 192), "bf16_all"), (ValueError, "no"))
            kind, words = _attention.unsuited(*made(264, 128))
            self.assertIn("from 1 to 256", words)

    def test_a_recording_has_calls_as_captures_know_them(self):
        q, k, v = drawn(*[(1, 2, 6, 8)] * 3)
        recording = _recording.Recording(torch.nn.Linear(1, 1))
        with recording.running():
            o = evenkeel.attention(q, k, v, is_causal=True, sinks=torch.zeros(2))
            o.sum().backward()
            evenkeel.attention(q, k, v, is_causal=True, alibi_slopes=torch.ones(2))
        self.assertEqual(len(recording.calls), 1)  # without the sink: its share is a factor of the output's gradient
        self.assertTrue((recording.calls[0].d_o < 1).all())
        self.assertIn("ALiBi", str(recording.skipped))


class Plain(DoorCase):
    def test_is_the_formula(self):
        x = drawn((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
        visible = torch.rand(5, 7) < 0.6
        visible[:, 0] = True
        self.assert_near(with_gradients(lambda *t: _plain.plain_attention(*t, visible)[0], x),
                         with_gradients(lambda *t: exact(*t, visible), x), 1e-6)
        visible[3] = False
        o, lse = _plain.plain_attention(*x, visible)
        self.assertEqual((o[:, :, 3].abs().sum().item(), lse[0, 0, 3].item()), (0.0, -torch.inf))
        for gradient in torch.autograd.grad(o.sum(), x):
            self.assertTrue(torch.isfinite(gradient).all())
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
        o, lse = _plain.plain_attention(*x, sinks=sinks)
        wide = torch.cat([x[0] @ x[1].repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5,
                          sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
        self.assert_near([o, lse], [wide.softmax(-1)[..., :-1] @ x[2].repeat_interleave(2, 1), wide.logsumexp(-1)], 1e-6)


class Packed(DoorCase):
    LENGTHS = ((5, 5), (1, 1), (9, 9)), ((3, 8), (4, 4), (2, 6))

    def parts(self, lengths, H=4, G=2, D=8, dtype=torch.float32):
        rows, keys = (torch.tensor([0, *[pair[n] for pair in lengths]]).cumsum(0).to(torch.int32) for n in (0, 1))
        q, k, v = drawn((int(rows[-1]), H, D), (int(keys[-1]), G, D), (int(keys[-1]), G, D), dtype=dtype)
        return q, k, v, rows, keys, max(r for r, _ in lengths), max(n for _, n in lengths)

    def by_formula(self, q, k, v, rows, keys, causal, window=(-1, -1), scale=None, bias=None):
        out = []
        for a, b, c, d in zip(rows.tolist(), rows.tolist()[1:], keys.tolist(), keys.tolist()[1:]):
            part = [t.transpose(0, 1).unsqueeze(0) for t in (q[a:b], k[c:d], v[c:d])]
            o, lse = _plain.plain_attention(*part, _plain.band(b - a, d - c, causal, window), bias and bias(b - a, d - c), scale)
            out.append((o[0].transpose(0, 1), lse[0]))
        return torch.cat([o for o, _ in out]), torch.cat([lse for _, lse in out], 1)

    def test_is_each_sequence_by_itself(self):
        for lengths in self.LENGTHS:
            for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (True, (2, 0)), (False, (1, 2))):
                q, k, v, rows, keys, *longest = self.parts(lengths)
                run = lambda *t: flash_attn.flash_attn_varlen_func(*t, rows, keys, *longest, causal=causal, window_size=window)
                expected = with_gradients(lambda *t: self.by_formula(*t, rows, keys, causal, window)[0], (q, k, v))
                self.assert_near(with_gradients(run, (q, k, v)), expected, 2e-6, f"{lengths} {causal} {window}")
        o, lse, nothing = flash_attn.flash_attn_varlen_func(q, k, v, rows, keys, *longest, return_attn_probs=True)
        plain = self.by_formula(q, k, v, rows, keys, False)
        self.assert_near([lse], [plain[1]], 2e-6)
        d_l = torch.randn(lse.shape)
        self.assert_near(torch.autograd.grad(lse, (q, k), d_l), torch.autograd.grad(plain[1], (q, k), d_l), 3e-6)
        self.assertEqual({call["kernel"] for call in evenkeel.coverage()}, {"cpu"})

    def test_packed_forms_bf16_and_pages(self):
        q, k, v, rows, keys, *longest = self.parts(self.LENGTHS[0], G=4)
        expected = flash_attn.flash_attn_varlen_func(q, k, v, rows, keys, *longest, causal=True)
        self.assertTrue(torch.equal(expected, flash_attn.flash_attn_varlen_qkvpacked_func(
            torch.stack([q, k, v], 1), rows, longest[0], causal=True)))
        self.assertTrue(torch.equal(expected, flash_attn.flash_attn_varlen_kvpacked_func(
            q, torch.stack([k, v], 1), rows, keys, *longest, causal=True)))
        narrow = [t.detach().to(BF16).requires_grad_() for t in (q, k, v)]
        found = with_gradients(lambda *t: flash_attn.flash_attn_varlen_func(*t, rows, keys, *longest, causal=True), narrow)
        self.assertTrue(all(t.dtype == BF16 for t in found))
        self.assert_near(found, with_gradients(lambda *t: self.by_formula(*t, rows, keys, True)[0], narrow), 3e-2)
        pages = torch.randn(6, 4, 4, 8)  # of four keys each
        table = torch.tensor([[3, 0, 0], [1, 2, 0]], dtype=torch.int32)
        few = torch.tensor([0, 3, 8], dtype=torch.int32)
        flat = torch.cat([pages[3][:3], pages[1], pages[2][:1]])
        self.assertTrue(torch.equal(
            flash_attn.flash_attn_varlen_func(q[:8], pages, pages, few, few, 5, 5, block_table=table),
            flash_attn.flash_attn_varlen_func(q[:8], flat, flat, few, few, 5, 5)))

    def test_what_kernels_do_not_take_and_bad_input(self):
        q, k, v, rows, keys, *longest = self.parts(self.LENGTHS[1])
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
        bias = lambda T, N: _plain.alibi_bias(slopes, T, N)
        expected = with_gradients(lambda *t: self.by_formula(*t, rows, keys, True, bias=bias)[0], (q, k, v))
        for given, warned in ((slopes, 0), (slopes.expand(len(rows) - 1, 4), 1)):  # slopes of each sequence: in PyTorch
            with quiet() as caught:
                found = with_gradients(lambda *t: flash_attn.flash_attn_varlen_func(*t, rows, keys, *longest, causal=True,
                                                                                   alibi_slopes=given), (q, k, v))
            self.assert_near(found, expected, 2e-6)
            self.assertEqual(["alibi_slopes" in str(w.message) for w in caught], [True] * warned)
        empty = torch.tensor([0, 3, 3, 9], dtype=torch.int32)  # a sequence with neither rows nor keys
        o = flash_attn.flash_attn_varlen_func(q, k[:9], v[:9], empty, empty, 6, 6)
        self.assertTrue(torch.isfinite(o).all())
        run = lambda *a, **o: lambda: flash_attn.flash_attn_varlen_func(*a, **o)
        name = "flash_attn_varlen_func: expected"
        self.assert_says(ValueError, run(q, k, v, rows + 1, keys, *longest), name, "cu_seqlens_q from 0 to 9")
        self.assert_says(ValueError, run(q, k, v, rows, keys[:-1], *longest), name, "cu_seqlens_k")
        self.assert_says(ValueError, run(q, k, v, rows[:2] * 3, keys, *longest), name)
        self.assert_says(ValueError, run(q, k, v, None, keys, *longest), name, "cu_seqlens_q", "NoneType")
        self.assert_says(ValueError, run(q[0], k, v, rows, keys, *longest), name, "q with 3 axes")


class FlashAttn(DoorCase):
    def test_dropout_alibi_and_halves_are_computed_and_listed(self):
        q, k, v = drawn((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
        first = lambda t: t.transpose(1, 2)
        slopes = torch.tensor([[0.5, 0.1, 0.2, 0.3], [0.0, 0.4, 0.1, 1.0]])
        with quiet() as caught:
            for _ in range(2):
                found = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, softcap=3.0)
                half = flash_attn.flash_attn_func(q.half(), k.half(), v.half())
                torch.manual_seed(1)
                dropped = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
        self.assertEqual(len(caught), 2, [str(w.message) for w in caught])
        distance = (torch.arange(9).view(1, 9) - torch.arange(4, 9).view(5, 1)).abs()
        scores = 3 * torch.tanh(first(q) @ first(k).repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5 / 3)
        scores = (scores - slopes.view(2, 4, 1, 1) * distance).masked_fill(~torch.ones(5, 9, dtype=torch.bool).tril(4), -torch.inf)
        self.assert_near([found], [first(scores.softmax(-1) @ first(v).repeat_interleave(2, 1))], 1e-6)
        self.assertEqual(half.dtype, torch.float16)
        self.assert_near([half], [first(exact(first(q), first(k), first(v)))], 2e-3)
        self.assertFalse(torch.allclose(dropped, first(exact(first(q), first(k), first(v)))))
        listed = evenkeel.coverage()
        self.assertEqual([call["kernel"] for call in listed], ["pytorch", "cpu", "pytorch"])
        self.assertEqual([call["calls"] for call in listed], [2, 2, 2])
        self.assertFalse(listed.covered)
        self.assertIn("alibi_slopes", str(listed))
        flash_attn.configure(strict=True)
        self.addCleanup(flash_attn.configure)
        self.assert_says(evenkeel.NotCovered, lambda: flash_attn.flash_attn_func(q, k, v, dropout_p=0.1), "0.1", "strict")

    def test_packed_tensors_and_plans(self):
        q, k, v = drawn(*[(2, 6, 2, 8)] * 3)
        expected = flash_attn.flash_attn_func(q, k, v, causal=True)
        self.assertTrue(torch.equal(expected, flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True)))
        self.assertTrue(torch.equal(expected, flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True)))
        # A right side of 0 is causal, with or without the flag.
        self.assertTrue(torch.equal(expected, flash_attn.flash_attn_func(q, k, v, window_size=(-1, 0))))
        self.assertTrue(torch.equal(expected, flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(-1, 5))))
        flash_attn.configure(plan="flash2")
        self.addCleanup(flash_attn.configure)
        rounded = flash_attn.flash_attn_func(q, k, v, causal=True)
        self.assertFalse(torch.equal(expected, rounded))
        self.assertTrue(torch.equal(rounded, flash_attn.flash_attn_func(q, k, v, causal=True, plan="flash2")))
        self.assertEqual(evenkeel.coverage()[-1]["plan"], "flash2")

    def test_the_cache(self):
        torch.manual_seed(3)
        B, T, N, H, G, D = 2, 2, 10, 4, 2, 8
        q, new_k, new_v = torch.randn(B, T, H, D), torch.randn(B, T, G, D), torch.randn(B, T, G, D)
        keys, values = torch.randn(B, N, G, D), torch.randn(B, N, G, D)
        lengths = torch.tensor([3, 7], dtype=torch.int32)
        angle = torch.rand(N, D // 2) * 6
        turn = lambda x, at: flash_attn._rotated(x, angle.cos(), angle.sin(), at, True)
        at = lengths.long().view(B, 1) + torch.arange(T)
        found, lse = flash_attn.flash_attn_with_kvcache(q, keys, values, new_k, new_v, angle.cos(), angle.sin(), lengths,
                                                        causal=True, return_softmax_lse=True)
        turned_q, turned_k = turn(q, at), turn(new_k, at)
        for n, length in enumerate(lengths.tolist()):
            self.assertTrue(torch.equal(keys[n, length : length + T], turned_k[n]))  # written in place
            expected = flash_attn.flash_attn_func(turned_q[n : n + 1], keys[n : n + 1, : length + T], values[n : n + 1, : length + T],
                                                  causal=True)
            self.assertTrue(torch.equal(found[n : n + 1], expected))
        # The pair (a, b) is a complex number, turned by its angle.
        z = torch.view_as_complex(q.reshape(B, T, H, D // 2, 2).contiguous())
        turned = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)[at].unsqueeze(2)).flatten(-2)
        self.assert_near([turned_q], [turned], 1e-6)
        pages, table = torch.randn(8, 4, G, D), torch.tensor([[5, 1, 2], [0, 7, 3]], dtype=torch.int32)
        paged = flash_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
        whole = torch.stack([pages[row.long()].flatten(0, 1) for row in table])
        self.assertTrue(torch.equal(paged, flash_attn.flash_attn_with_kvcache(q, whole, whole, cache_seqlens=lengths)))
        picked = flash_attn.flash_attn_with_kvcache(q, whole, whole, cache_seqlens=7, cache_batch_idx=torch.tensor([1, 1]))
        self.assertTrue(torch.equal(picked[1], flash_attn.flash_attn_with_kvcache(q, whole, whole, cache_seqlens=7)[1]))
        self.assert_says(ValueError, lambda: flash_attn.flash_attn_with_kvcache(q, keys, values, new_k, new_v, cache_seqlens=9),
                         "room for 11 keys", "found 10")

    def test_in_the_place_of_flash_attn(self):
        self.addCleanup(flash_attn.install())
        import importlib

        import flash_attn as installed  # noqa: F401
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        self.assertIs(installed.flash_attn_func, evenkeel.flash_attn_func)
        self.assertIs(flash_attn_varlen_func, flash_attn.flash_attn_varlen_func)
        self.assertIsNotNone(importlib.util.find_spec("flash_attn"))
        x, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
        rows, indices, starts, longest, _ = unpad_input(x, mask)
        self.assertEqual((starts.tolist(), longest, rows.shape[0]), ([0, 2, 5], 3, 5))
        self.assertTrue(torch.equal(pad_input(rows, indices, 2, 4), x * mask.unsqueeze(-1)))


class Patched(DoorCase):
    def test_coverage_strict_and_what_falls_back(self):
        calls = []
        self.original(lambda *a, **o: calls.append(o) or a[0])
        q = torch.randn(1, 2, 6, 8)
        with evenkeel.patched(), quiet() as caught:
            for _ in range(3):
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
            F.scaled_dot_product_attention(q, q, q, new_keyword=7)  # what we do not know is not dropped
        self.assertEqual(calls[-1]["new_keyword"], 7)
        self.assertEqual(len(caught), 2)
        ours, dropout, unknown = evenkeel.coverage()
        self.assertEqual((ours["kernel"], ours["plan"], ours["calls"], ours["door"]), ("cpu", "fp32", 3, "scaled_dot_product_attention"))
        self.assertIn("dropout_p", dropout["why"])
        self.assertIn("new_keyword", unknown["why"])
        evenkeel.next_step()
        with evenkeel.patched(strict=True):
            F.scaled_dot_product_attention(q, q, q)
            self.assertEqual(len(evenkeel.coverage()), 1)  # a step of its own
            self.assertTrue(evenkeel.coverage().covered)
            self.assert_says(evenkeel.NotCovered, lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), "dropout_p")
            self.assert_says(evenkeel.NotCovered, lambda: F.scaled_dot_product_attention(*[q.to(torch.complex64)] * 3), "complex64")
        self.assertEqual(len(calls), 2)
        _coverage._calls.clear()
        self.assertFalse(evenkeel.coverage().covered)  # nothing seen is not covered
        self.assertIn("no call", str(evenkeel.coverage()))

    def test_modules_that_imported_the_function_before(self):
        self.original(lambda *a, **o: a[0])
        before = F.scaled_dot_product_attention
        user = self.stand_in("somebodys_model", scaled_dot_product_attention=before)
        with evenkeel.patched():
            self.assertIs(user.scaled_dot_product_attention, F.scaled_dot_product_attention)
        self.assertIs(user.scaled_dot_product_attention, before)

    def test_a_gpu_without_our_kernels(self):
        if not torch.cuda.is_available():
            kind, words = _attention.unsuited_gpu(0)
            self.assertIs(kind, RuntimeError)
            self.assertTrue("CUDA" in words or "GPU" in words, words)
        self.original(lambda *a, **o: "PyTorch's own")
        from evenkeel import _patch
        self.addCleanup(setattr, _patch, "unsuited", _patch.unsuited)
        _patch.unsuited = lambda *_: (RuntimeError, "expected an NVIDIA GPU, found ROCm 6")
        with evenkeel.patched(), quiet() as caught:
            q = torch.randn(1, 1, 2, 4)
            self.assertEqual(F.scaled_dot_product_attention(q, q, q), "PyTorch's own")
        self.assertIn("ROCm", str(caught[0].message))

    def test_the_registry_of_flash_attention_and_varlen_attn(self):
        registry, active = {}, []
        attention = types.SimpleNamespace(register_flash_attention_impl=lambda impl, *, register_fn: registry.update({impl: register_fn}))
        if hasattr(torch.nn, "attention"):
            self.addCleanup(setattr, torch.nn, "attention", torch.nn.attention)
        else:
            self.assert_says(ImportError, evenkeel.register_flash_attention_impl, "2.11", torch.__version__)
            self.addCleanup(delattr, torch.nn, "attention")
        torch.nn.attention = attention
        own = lambda *a, **o: "PyTorch's own"
        varlen = self.stand_in("torch.nn.attention.varlen", varlen_attn=own)
        user = self.stand_in("torchtitans_model", varlen_attn=own)
        self.original(lambda *a, **o: a[0])
        before = F.scaled_dot_product_attention
        evenkeel.register_flash_attention_impl(plan="fp32")
        self.assertIs(F.scaled_dot_product_attention, before)  # registered is not active
        active.append(registry["evenkeel"]())
        self.assertIsNot(F.scaled_dot_product_attention, before)
        q, k, v = drawn(*[(8, 2, 4)] * 3)
        starts = torch.tensor([0, 3, 8], dtype=torch.int32)
        expected = flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True)
        self.assertTrue(torch.equal(user.varlen_attn(q, k, v, starts, starts, 5, 5, window_size=(-1, 0)), expected))
        aux = types.SimpleNamespace(lse=True)
        self.assertEqual(varlen.varlen_attn(q, k, v, starts, starts, 5, 5, return_aux=aux)[1].shape, (2, 8))
        with quiet() as caught:
            other = [t.to(torch.complex64) for t in (q, k, v)]
            self.assertEqual(varlen.varlen_attn(*other, starts, starts, 5, 5), "PyTorch's own")
            self.assertEqual(varlen.varlen_attn(q, k, v, starts, starts, 5, 5, seqused_k=starts), "PyTorch's own")
        self.assertEqual(len(caught), 2)
        active.pop().remove()
        self.assertIs(F.scaled_dot_product_attention, before)
        self.assertIs(user.varlen_attn, own)


class Transformers(DoorCase):
    """The attention function that register() gives to transformers, called as its models call it."""

    def setUp(self):
        super().setUp()
        self.seen = []

        def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **options):
            self.seen.append({"mask": attention_mask, "scaling": scaling, "dropout": dropout, **options})
            o, _ = _plain.plain_attention(query, key, value, None, attention_mask, scaling, options.get("softcap") or 0.0,
                                          getattr(module, "sinks", None))
            return o.transpose(1, 2), None

        self.home = self.stand_in("modeling_somebody", eager_attention_forward=eager_attention_forward)
        kind = type("SomebodysAttention", (torch.nn.Module,), {"__module__": "modeling_somebody", "is_causal": True})
        self.module = kind()
        self.forward = hf._forward("fp32", None, False)
        self.x = drawn((1, 4, 10, 8), (1, 2, 10, 8), (1, 2, 10, 8))

    def ours(self, *mask, **options):
        return self.forward(self.module, *self.x, mask[0] if mask else None, **options)[0].transpose(1, 2)

    def test_sinks_are_not_lost(self):
        sinks = torch.tensor([0.3, -2.0, 1.0, 4.0], requires_grad=True)
        x = (*self.x, sinks)
        run = lambda q, k, v, s: self.forward(self.module, q, k, v, None, s_aux=s)[0].transpose(1, 2)
        expected = with_gradients(lambda q, k, v, s: _plain.plain_attention(q, k, v, lower(10, 10), sinks=s)[0], x)
        self.assert_near(with_gradients(run, x), expected, 3e-6)
        self.assertEqual(evenkeel.coverage()[0]["kernel"], "cpu")

    def test_keywords_nobody_knows_go_to_the_models_own_eager(self):
        bias = torch.randn(1, 4, 10, 10)
        with quiet() as caught:
            self.ours(position_bias=bias)
        self.assertIs(self.seen[0]["position_bias"], bias)
        mask = self.seen[0]["mask"]  # causal, as numbers to be added
        self.assertTrue(torch.equal(mask[0, 0] == 0, lower(10, 10)))
        self.assertLess(mask.min().item(), -1e30)
        self.assertEqual(self.seen[0]["scaling"], 8**-0.5)
        self.assertIn("position_bias", str(caught[0].message))
        self.assertIn("position_bias", evenkeel.coverage()[0]["why"])
        strict = hf._forward("fp32", None, True)
        self.assert_says(evenkeel.NotCovered, lambda: strict(self.module, *self.x, None, position_bias=bias), "position_bias")
        del self.home.eager_attention_forward
        self.assert_says(TypeError, lambda: self.ours(position_bias=bias), "position_bias", "no eager_attention_forward")
        with quiet() as caught:  # and what changes nothing stays here
            self.ours(position_ids=torch.arange(10), use_cache=False, position_bias=None, output_attentions=False)
        self.assertEqual(len(caught), 0)

    def test_softcap_windows_masks_and_dropout(self):
        x, last = self.x, {}
        near = lambda found, visible, **o: self.assert_near([found], [_plain.plain_attention(*x, visible, **o)[0]], 3e-6)
        near(self.ours(softcap=2.0), lower(10, 10), softcap=2.0)
        near(self.ours(sliding_window=4), lower(10, 10).triu(-3))
        near(self.ours(sliding_window=64), lower(10, 10))
        padding = (torch.arange(10) < 7).view(1, 1, 1, 10) & lower(10, 10)
        near(self.ours(padding.expand(1, 1, 10, 10)), padding)
        near(self.ours(is_causal=False, scaling=0.3), None, scale=0.3)
        with quiet():  # what is not taken keeps its softcap and its mask
            found = self.ours(padding.expand(1, 1, 10, 10), softcap=2.0, temperature=1.0)
        self.assertEqual(self.seen[-1]["softcap"], 2.0)
        near(found, padding, softcap=2.0)
        with quiet():
            self.ours(dropout=0.1)
        self.assertEqual(self.seen[-1]["dropout"], 0.1)

    def test_packed_batches(self):
        starts = torch.tensor([0, 3, 4, 10], dtype=torch.int32)
        packing = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=6, max_length_k=6)
        block = torch.zeros(10, 10, dtype=torch.bool)
        for a, b in ((0, 3), (3, 4), (4, 10)):
            block[a:b, a:b] = True
        run = lambda *t, mask=None, **o: self.forward(self.module, *t, mask, **packing, **o)[0].transpose(1, 2)
        for options, visible in (({}, block & lower(10, 10)), ({"is_causal": False}, block),
                                 ({"sliding_window": 2}, block & lower(10, 10).triu(-1))):
            expected = with_gradients(lambda *t: _plain.plain_attention(*t, visible)[0], self.x)
            self.assert_near(with_gradients(lambda *t: run(*t, **options), self.x), expected, 3e-6, str(options))
        mask = (torch.rand(1, 1, 10, 10) < 0.7) | torch.eye(10, dtype=torch.bool)
        self.assert_near([run(*self.x, mask=mask)], [_plain.plain_attention(*self.x, mask & block)[0]], 3e-6)
        with quiet():
            run(*self.x, position_bias=torch.zeros(1))
        self.assertTrue(torch.equal(self.seen[-1]["mask"][0, 0] == 0, block & lower(10, 10)))

    def test_register(self):
        known = {}
        register = types.SimpleNamespace(register=lambda name, fn: known.setdefault(name, []).append(fn))
        self.stand_in("transformers", AttentionInterface=register, AttentionMaskInterface=register)
        self.stand_in("transformers.masking_utils", sdpa_mask="the mask")
        hf.register("named", plan="fp32")
        self.assertEqual(known["named"][1], "the mask")
        self.assertTrue(callable(known["named"][0]))


class KernelsFolder(DoorCase):
    def test_the_layout_of_hugging_face_kernels(self):
        import importlib.util

        import hf_kernel_folder

        variant = hf_kernel_folder.write(self.folder(), evenkeel.library_path())
        x = drawn(*[(1, 5, 2, 8)] * 3)
        expected = evenkeel.flash_attn_func(*x, causal=True)
        for place in (variant / "__init__.py", variant / "evenkeel" / "__init__.py"):
            name = f"kernel_{place.parent.name.replace('-', '_')}"
            spec = importlib.util.spec_from_file_location(name, place, submodule_search_locations=[str(place.parent)])
            kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
            self.addCleanup(sys.modules.pop, name)
            spec.loader.exec_module(kernel)
            self.assertTrue(torch.equal(kernel.flash_attn_func(*x, causal=True), expected))
            self.assertIsNot(kernel.flash_attn_func, evenkeel.flash_attn_func)
        self.assertTrue((variant / "metadata.json").exists())


class Sharded(DoorCase):
    """DTensor's interface: to_local, from_local, placements, device_mesh."""

    class Shard:
        def __init__(self, dim):
            self.dim = dim

        is_replicate, is_shard = lambda _: False, lambda _: True
        __eq__ = lambda self, other: type(other) is type(self) and other.dim == self.dim

    class Fake(torch.Tensor):
        @classmethod
        def from_local(cls, local, mesh, placements, run_check=True):
            whole = local.as_subclass(cls)
            whole.device_mesh, whole.placements = mesh, placements
            return whole

        def to_local(self):
            return self.as_subclass(torch.Tensor)

    def test_by_local_tensors(self):
        x = drawn(*[(1, 2, 6, 8)] * 3)
        sharded = lambda *dims: [self.Fake.from_local(t, "mesh", [self.Shard(dim)]) for t, dim in zip(x, dims)]
        o = evenkeel.attention(*sharded(1, 1, 1))
        self.assertIsInstance(o, self.Fake)
        self.assertEqual((o.device_mesh, o.placements[0].dim), ("mesh", 1))
        self.assertTrue(torch.equal(o.to_local(), evenkeel.attention(*x)))
        self.assert_says(ValueError, lambda: evenkeel.attention(*sharded(2, 2, 2)), "sharded over the batch", "redistribute")
        self.assert_says(ValueError, lambda: evenkeel.attention(*sharded(1, 0, 0)), "sharded alike")


class BadInput(DoorCase):
    def test_inference_double_backward_and_vmap(self):
        q, k, v = drawn(*[(1, 2, 5, 8)] * 3)
        with torch.inference_mode():
            o = evenkeel.attention(q, k, v)
        self.assertFalse(o.requires_grad)
        with torch.no_grad():
            self.assertTrue(torch.equal(o, evenkeel.attention(q, k, v)))
            starts = torch.tensor([0, 5], dtype=torch.int32)
            packed = flash_attn.flash_attn_varlen_func(*(t[0].transpose(0, 1) for t in (q, k, v)), starts, starts, 5, 5)
        self.assert_near([packed], [o[0].transpose(0, 1)], 0)
        only_v = evenkeel.attention(q.detach(), k.detach(), v)  # not every input needs a gradient
        only_v.sum().backward()
        self.assertIsNotNone(v.grad)
        (dq,) = torch.autograd.grad(flash_attn.flash_attn_func(q, k, v).sum(), q, create_graph=True)
        with self.assertRaises(RuntimeError):
            torch.autograd.grad(dq.sum(), k)
        many = torch.stack([q.detach()] * 2)
        try:
            from functorch import vmap
        except ImportError:
            from torch.func import vmap
        try:
            found = vmap(lambda t: evenkeel.attention(t, t, t))(many)
        except RuntimeError:
            return  # refused by PyTorch, which says so
        self.assert_near([found[0]], [evenkeel.attention(*[q.detach()] * 3)], 1e-6)


if __name__ == "__main__":
    main()
