# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# ## How many examples?
#
# The four results that follow took longer than a chapter should, about [[full: total]] minutes in all; their outputs were recorded. Where no GPU is present the cells run a short form that only checks that the code works.

# %%
FULL = bool(os.environ.get("ATTENTION_FULL_RUN")) or (
    torch.cuda.is_available())
SEEDS = (0, 1, 2) if FULL else (0,)
UPDATES, TEST = (350, 1000) if FULL else (2, 10)

def report(begin):
    print(f"{'full' if FULL else 'short'} form, "
          f"{time.strftime('%Y-%m-%d')}, seeds {SEEDS}, {UPDATES} updates, "
          f"{pick_device()}, {(time.time() - begin) / 60:.1f} min")

def learned(numbers, seed, updates=UPDATES, **options):
    model = new_model(seed, **options)
    taught(model, [pair(n) for n in numbers], updates, progress=False)
    return model

print("numbers of each test in the full form: 1000, in the short one: 10")

# %% [markdown]
# 20,000 pairs are 2 % of the language. **Guess first:** always with 350 updates, how many pairs does it take to get nine unseen numbers of ten right: 500, 2,000 or 10,000? (The byte pairs
# stay those of 1,000 training numbers.)

# %% tags=["full-run", "nbval-ignore-output"]
begin = time.time()
sizes = (250, 500, 1000, 2000, 5000, 20_000) if FULL else (200, 400)
by_size = torch.zeros(len(sizes), len(SEEDS))
for i, size in enumerate(sizes):
    for j, seed in enumerate(SEEDS):
        some = random.Random(seed).sample(seen, size)
        by_size[i, j] = 100 * exact(learned(some, seed), unseen[:TEST])
    print(f"{size:6,} pairs   exact match, by seed: "
          + "  ".join(f"{share:5.1f} %" for share in by_size[i].tolist()))
report(begin)
assert by_size.isfinite().all() and by_size.max() <= 100
means = by_size.mean(dim=1)
enough = [size for size, mean in zip(sizes, means) if mean > 90]
plt.plot(sizes, means, color=LINES[0][0], label="mean")
for seed, shares in zip(SEEDS, by_size.T):
    plt.plot(sizes, shares, "o", color=LINES[1][0], linestyle="none",
             label=None if seed else "one seed")
plt.gca().set(xscale="log", xticks=sizes, ylim=(-3, 103),
              xticklabels=[f"{size:,}" for size in sizes],
              xlabel="training pairs", ylabel="exact match (%)",
              title=f"{min(enough):,} pairs are enough for nine in ten"
              if enough else "So few pairs and updates teach nothing")
plt.minorticks_off()
plt.legend(loc="lower right")
show("Exact match on numbers never seen against the number of training "
     "pairs, three seeds each, always with the same number of updates.")

# %% [markdown]
# [[full: pairs, what was seen: 250 pairs ..., 1,000 ..., 20,000 ...]]
#
# ## Longer than any number seen
#
# A person who can read 9,321 and 54 can read 54,321: nothing in it is new except its length. We teach the model the numbers below 10,000 and ask for longer ones. For this, the pieces must come from short numbers, too;
# otherwise *fünfzigtausend* would be a piece that training never shows.

# %%
below = random.Random(0).sample(range(1, 10_000), 9_999)
short = [BytePairEncoding.train(
    [with_blanks(spell(n, language)) for n in below[:1000]], merges)
    for language, merges in (("en", 200), ("de", 80))]
short_pair = pairing(*short)
longer = [random.Random(digits).sample(range(10**digits // 10, 10**digits),
                                       1000) for digits in (5, 6)]
tests = {"at most 4": below[8999:], "5": longer[0], "6": longer[1]}

ids = {i for n in below[:8999] for i in short_pair(n)[1]}
new = [n for n in longer[0] + longer[1] if not {*short_pair(n)[1]} <= ids]
print("|".join(named(short[1], short_pair(54_321)[1])))
print("of 2,000 longer numbers, with a German piece never taught:", len(new))

# %% [markdown]
# **Guess first:** four digits learnt, how many of the five-digit numbers come out right, and of the six-digit ones? Three kinds of positions (chapter 05) compete: sinusoids, learned vectors, and none.

# %% tags=["full-run", "nbval-ignore-output"]
begin, by_length = time.time(), {}
pairs = [short_pair(n) for n in below[:8999 if FULL else 300]]
for kind in ("sinusoidal", "learned", "none"):
    results = torch.zeros(len(SEEDS), 3)
    for seed in SEEDS:
        one = new_model(seed, [len(p.pieces) for p in short],
                        positions=kind)
        taught(one, pairs, UPDATES, progress=False)
        results[seed] = torch.tensor([100 * exact(
            one, numbers[:TEST], pair=short_pair, target=short[1])
            for numbers in tests.values()])
    by_length[kind] = results
    print(f"{kind:10s}  mean (lowest to highest seed)  " + "   ".join(
        f"{name} digits: {part.mean():.1f} ({part.min():.1f} to "
        f"{part.max():.1f}) %" for name, part in zip(tests, results.T)))
print("the last model says:", *say(one, [54_321], pair=short_pair,
                                   target=short[1]))
report(begin)
assert all(part.isfinite().all() for part in by_length.values())

# %% [markdown]
# [[full: lengths, what was seen]]
#
# ## Is it the Transformer?
#
# Perhaps anything would learn number words. Two rivals get the same pairs, updates, batches and loss, and each its best of three learning rates. The first is an **LSTM encoder–decoder with attention**, the translator of the years before
# 2017 (Bahdanau, 2015; Luong, 2015): the encoder reads the source in both directions, the decoder's state is the query, the encoder's states are keys and values.

# %%
class Recurrent(nn.Module):
    def __init__(self, sizes=SIZES, d=128, width=152):
        super().__init__()
        self.source, self.target = (TokenEmbedding(V, d) for V in sizes)
        self.read = nn.LSTM(d, width // 2, 2, batch_first=True, dropout=0.1,
                            bidirectional=True)
        self.write = nn.LSTM(d, width, 2, batch_first=True, dropout=0.1)
        self.join = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, sizes[1], bias=False)

    def forward(self, src, tgt):
        lengths = (src != 0).sum(dim=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.source(src), lengths, True, enforce_sorted=False)
        memory, state = self.read(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(
            memory, True, total_length=src.shape[1])
        # (2 layers * 2 directions, B, w / 2) -> (2, B, w)
        state = tuple(part.unflatten(0, (2, 2)).transpose(1, 2).flatten(2)
                      .contiguous() for part in state)
        query, _ = self.write(self.target(tgt), state)  # (B, T, w)
        heads = (x.unsqueeze(1) for x in (query, memory, memory))
        found, _ = attention(*heads, padding_mask(src))
        both = torch.cat([query, found.squeeze(1)], dim=-1)
        return self.output(self.join(both).tanh())

# %% [markdown]
# The second is `torch.nn.Transformer` of our sizes with everything as it comes: PyTorch's N(0, 1) embeddings, multiplied by $\sqrt{d_{model}}$ as in the paper, and its own final norms.

# %%
class Library(nn.Module):
    def __init__(self, sizes=SIZES, d=128):
        super().__init__()
        self.source, self.target = (nn.Embedding(V, d) for V in sizes)
        self.positions = PositionalEncoding(d, dropout=0.1)
        self.stacks = nn.Transformer(d, 4, 2, 2, 256, 0.1, batch_first=True)
        self.stacks.encoder.use_nested_tensor = False  # only warns
        self.output = nn.Linear(d, sizes[1])

    def forward(self, src, tgt):
        x, y = (self.positions(table(ids) * table.embedding_dim**0.5)
                for table, ids in ((self.source, src), (self.target, tgt)))
        past = causal_mask(tgt.shape[1], device=tgt.device)
        return self.output(self.stacks(
            x, y, tgt_mask=~past, src_key_padding_mask=src == 0,
            memory_key_padding_mask=src == 0))

# %%
RIVALS = {"ours": Transformer, "LSTM": Recurrent, "library": Library}

def rival(name, seed=0):
    torch.manual_seed(seed)
    return new_model(seed) if name == "ours" else RIVALS[name]()

@torch.inference_mode()
def plain_greedy(model, src, steps=20):  # no cache: any model can do it
    tgt = torch.full_like(src[:, :1], 1)
    for _ in range(steps):
        new = model(src, tgt)[:, -1:].argmax(dim=-1)
        ended = (tgt == 2).any(dim=1, keepdim=True)
        tgt = torch.cat([tgt, new.masked_fill(ended, 0)], dim=1)
    return tgt[:, 1:]

for name in RIVALS:
    count = sum(weight.numel() for weight in rival(name).parameters())
    print(f"{name:8s} {count:,} parameters")

# %% [markdown]
# Nearly equal sizes. Two checks before the race: no logit may depend on later target tokens, nor on padding; and our decoding with a cache must give what the plain loop gives.

# %%
src, tgt = rows(unseen[:20])
src, tgt = src.to(pick_device()), tgt.to(pick_device())
for name in RIVALS:
    tried = rival(name).to(pick_device()).eval()
    with torch.no_grad():
        logits = tried(src, tgt)
        short_tgt = tried(src, tgt[:, :4])
        padded = tried(nn.functional.pad(src, (0, 3)), tgt)
    assert torch.allclose(logits[:, :4], short_tgt, atol=1e-4)
    assert torch.allclose(logits, padded, atol=1e-4)
    print(f"{name:8s} sees neither the future nor padding")
plain = say(model, unseen, plain_greedy)
assert sum(a != b for a, b in zip(plain, greedy)) < 20
assert max(len(pair(n)[1]) for n in drawn) <= 20

# %% [markdown]
# **Guess first:** which of the three is best after 350 updates, and by how much?

# %% tags=["full-run", "nbval-ignore-output"]
begin, rates, race = time.time(), (7e-4, 2e-3, 6e-3), {}
pairs = [pair(n) for n in (seen if FULL else seen[:300])]
for name in RIVALS:
    def run(peak, seed):
        one, start = rival(name, seed), time.time()
        taught(one, pairs, UPDATES, peak, progress=False)
        taken = time.time() - start
        return [100 * exact(one.eval(), numbers[:TEST], decode=plain_greedy)
                for numbers in (watched, unseen)] + [taken]
    tried = {peak: run(peak, SEEDS[0]) for peak in rates}
    best = max(rates, key=lambda peak: tried[peak][0])  # never by the test
    race[name] = [tried[best]] + [run(best, seed) for seed in SEEDS[1:]]
    print(f"{name:8s} by rate: " + "  ".join(
        f"{peak:g}: {tried[peak][0]:.1f} %" for peak in rates))
    print(f"         best rate {best:g}, test, by seed: " + "  ".join(
        f"{result[1]:.1f} %" for result in race[name])
        + f"   {race[name][0][2]:.0f} s a training")
report(begin)
assert all(len(results) == len(SEEDS) for results in race.values())

# %% [markdown]
# [[full: race, what was seen, and that the fixed grid's edge ...]]
#
# ## One model, several languages
#
# French counts in twenties: 97 is *quatre-vingt-dix-sept*, four twenties and seventeen. Japanese groups by ten thousands: 320,000 is thirty-two *man*, 三十二万. Can one model learn German, French and Japanese, and does it lose by it?
# First the answer keys again, against forms that grammars give, and Japanese against a rule of its own.

# %%
KNOWN_FORMS = {
    71: "soixante et onze", 80: "quatre-vingts", 81: "quatre-vingt-un",
    97: "quatre-vingt-dix-sept", 200: "deux cents", 201: "deux cent un",
    1000: "mille", 80_000: "quatre-vingt mille", 21_000: "vingt et un mille",
    200_000: "deux cent mille", 300_080: "trois cent mille quatre-vingts"}

def four_digits(n):
    digits = zip("千百十 ", f"{n:04d}")
    return "".join(("" if d == "1" and unit != " " else
                    " 一二三四五六七八九"[int(d)]) + unit.strip()
                   for unit, d in digits if d != "0")

for n, words in KNOWN_FORMS.items():
    assert spell(n, "fr") == words, (n, spell(n, "fr"))
for n in drawn:
    man = four_digits(n // 10_000) + "万" if n > 9999 else ""
    assert spell(n, "ja") == man + four_digits(n % 10_000)
print("French: 11 forms right; Japanese: all 22,000 numbers follow the rule")
print(spell(97, "fr"), spell(654_321, "fr"), spell(654_321, "ja"), sep="\n")

# %% [markdown]
# No fault found. The target vocabulary is now one for all three, since the decoder's is one. What language is wanted the encoder learns from a token in front of the source, with an id after the English pieces (Johnson, 2017).

# %%
LANGUAGES = ("de", "fr", "ja")
shared = BytePairEncoding.train(
    [spell(n, language) for n in seen[:300] for language in LANGUAGES], 240)
to = {language: pairing(source, shared, language, token=(SIZES[0] + i,))
      for i, language in enumerate(LANGUAGES)}
for language in LANGUAGES:
    src, tgt = to[language](654_321)
    print(src[0], "|".join(shared.decode([i]) for i in tgt[1:-1]))
assert all(spell(n, language) == shared.decode(to[language](n)[1][1:-1])
           for n in unseen[:50] for language in LANGUAGES)

# %% [markdown]
# Three single models, each for one language, against one model for all three: once with the updates of *one* single model (a third of what the three cost together), once with those of all three. All use the same vocabularies. **Guess first:** does the shared model gain or lose?

# %% tags=["full-run", "nbval-ignore-output"]
begin, table = time.time(), {}
def languages_learned(languages, size, updates, seed):
    some = random.Random(seed).sample(seen, size)
    one = new_model(seed, (SIZES[0] + 3, len(shared.pieces)))
    taught(one, [to[name](n) for name in languages for n in some], updates,
           progress=False)
    return [100 * exact(one, unseen[:TEST], language=name, pair=to[name],
                        target=shared) for name in languages]

for size in (1000, 10_000) if FULL else (100,):
    for seed in SEEDS[:2]:
        ways = {"three single models": [languages_learned(
            [name], size, UPDATES, seed)[0] for name in LANGUAGES]}
        for times in (1, 3):
            ways[f"shared, updates x {times}"] = languages_learned(
                LANGUAGES, size, UPDATES * times, seed)
        for way, shares in ways.items():
            table.setdefault((size, way), []).append(shares)
for (size, way), shares in table.items():
    print(f"{size:6,} pairs a language   {way:20s}  " + "   ".join(
        f"{name} " + ", ".join(f"{share:.1f}" for share in by_seed) + " %"
        for name, by_seed in zip(LANGUAGES, zip(*shares))))
report(begin)
assert all(0 <= share <= 100 for shares in table.values()
           for by_seed in shares for share in by_seed)


# %% [markdown]
# To add to *Where to read on*:
#
# - Luong, Pham, Manning, *Effective Approaches to Attention-based Neural Machine Translation*, EMNLP 2015, [arXiv 1508.04025](https://arxiv.org/abs/1508.04025): §3, the decoder that we imitate.
# - Johnson et al., *Google's Multilingual Neural Machine Translation System*, TACL 2017, [arXiv 1611.04558](https://arxiv.org/abs/1611.04558): §3, the token that names the language.
# - Lake, Baroni, *Generalization without Systematicity*, ICML 2018, [arXiv 1711.00350](https://arxiv.org/abs/1711.00350): longer commands from the same words.
