"""Facts made up for a text: how they are stated, how they are asked for, and the exact answer.

A fact has a kind of value (`KINDS`), a statement (one or more lines), questions, and one answer: the same question always has
the same answer, whatever the statement looked like. Answers say "The ... of ... is ...": a name that began one would be another token than
the same name behind a space. Training (`data.py`) and evaluation (`cases.py`) draw from the same generator
with different seeds, names and filler texts.
"""

from dataclasses import dataclass

PEOPLE = (
    "Ada Alan Barbara Bjarne Brian Dana Dennis Donald Edsger Frances Grace Guido Hana Ines Ivan James Joan John Karen "
    "Katherine Ken Kofi Lena Leslie Linus Margaret Maria Marta Mei Niklaus Nora Omar Oscar Priya Radia Rosa Sofia Tariq "
    "Tony Vera Wen Yuki Zoe"
).split()
PLACES = (
    "Oslo Lima Cairo Kyoto Quito Delhi Paris Accra Turin Sofia Dakar Perth Hanoi Leeds Miami Osaka Rabat Seoul Tunis "
    "Vilnius Zagreb Bergen Porto Ghent Basel Malmo"
).split()
SYLLABLES = [a + b for a in "b d f g k l m n p r s t v z br dr kr st tr pl".split() for b in "a e i o u ar el in or un".split()]
ATTRIBUTES = {
    "number": "port,retry limit,buffer size,batch size,queue depth,cache size,max depth,thread count,page size,seed,build number".split(
        ","
    ),
    "version": "version,revision,release,minimum version".split(","),
    "code": "access code,ticket id,serial number,token".split(","),
    "hex": "checksum,address,mask,build id".split(","),
    "error": "error code,exit code,last error".split(","),
    "duration": "timeout,interval,delay,grace period".split(","),
    "path": "path,log file,data directory".split(","),
    "word": "codename,mode,profile,keyword,label,theme".split(","),
    "words": "passphrase,password,motto,code phrase".split(","),
    "name": "owner,maintainer,reviewer,author".split(","),
    "place": "location,region,site,home city".split(","),
}
KINDS = tuple(ATTRIBUTES)
OFTEN = ("word", "word", "words", "words", "path")  # have more tokens to learn than others
NOT_SAID = "Not in the text."


@dataclass(frozen=True)
class Fact:
    """`statement` and `answer` contain `value` once each."""

    kind: str
    entity: str
    statement: str
    question: str
    answer: str
    value: str


class Facts:
    """Draws facts; `random` is a `random.Random`, `words` are the ordinary words that names and values are made of."""

    def __init__(self, random, words):
        self.random, self.words = random, words

    def word(self):
        return self.random.choice(self.words)

    def name(self):
        r, k = self.random, self.random.random()
        if k < 0.35:
            return self.word()
        if k < 0.6:
            return "".join(r.choice(SYLLABLES) for _ in range(r.choice((2, 2, 3))))
        if k < 0.8:
            return self.word() + r.choice("_-") + self.word()
        return self.word() + r.choice("_-") + str(r.randint(1, 99))

    def value(self, kind):
        r = self.random
        if kind == "number":
            return str(r.randint(10 ** r.choice((1, 2, 3, 3, 4)), 10**5))
        if kind == "version":
            return f"{r.randint(0, 9)}.{r.randint(0, 99)}.{r.randint(0, 30)}"
        if kind == "code":
            return "".join(r.choice("ABCDEFGHKLMNPQRSTVWXZ") for _ in range(2)) + "-" + str(r.randint(100, 9999))
        if kind == "hex":
            return "0x" + "".join(r.choice("0123456789abcdef") for _ in range(r.choice((4, 4, 6, 8))))
        if kind == "error":
            return "E" + str(r.randint(1000, 9999))
        if kind == "duration":
            return str(
                r.choice((5, 10, 15, 20, 30, 45, 60, 90, 100, 120, 150, 200, 250, 300, 400, 500, 750, 900, r.randint(2, 999)))
            ) + r.choice(("ms", "s", " seconds", " minutes"))
        if kind == "path":
            return (
                r.choice(("/srv", "/var/log", "/etc", "/opt", "/home"))
                + "/"
                + self.word()
                + r.choice(("", "/" + self.word(), ".log", ".conf"))
            )
        if kind == "word":
            return self.word()
        if kind == "words":
            return r.choice(("-", " ", " ")).join(self.word() for _ in range(r.choice((2, 2, 3))))
        return r.choice(PEOPLE if kind == "name" else PLACES)

    def fact(self, used, kind=None):
        """A fact about a pair of entity and attribute that is not in `used` (a set, added to)."""
        r = self.random
        while True:
            kind_of = kind or r.choice(KINDS + OFTEN)
            entity = r.choice(sorted(used))[0] if used and r.random() < 0.3 else self.name()
            attribute = r.choice(ATTRIBUTES[kind_of])
            if (entity, attribute) not in used:
                break
        used.add((entity, attribute))
        return self.state(kind_of, entity, attribute, self.value(kind_of))

    def state(self, kind, entity, attribute, value):
        r, k = self.random, self.random.random()
        mark = "`" if r.random() < 0.4 else ""
        e, a, v = f"{mark}{entity}{mark}", attribute, value
        if kind == "error" and k < 0.5:
            statement = r.choice((f"[{self.clock()}] ERROR {e} failed with code {v}", f"{self.day()} ERROR {e} failed with code {v}"))
            question = r.choice((f"Which code did {e} fail with?", f"With which code did {e} fail?"))
            return Fact(kind, entity, statement, question, f"The error code of {e} is {v}.", v)
        if kind == "name" and a == "owner" and k < 0.6:
            return Fact(kind, entity, f"The owner of {e} is {v}.", f"Who owns {e}?", f"The owner of {e} is {v}.", v)
        if kind == "place" and k < 0.4:
            statement = r.choice((f"{e} is hosted in {v}.", f"The server {e} is hosted in {v}."))
            question = r.choice((f"Where is {e} hosted?", f"In which city is {e} hosted?"))
            return Fact(kind, entity, statement, question, f"The location of {e} is {v}.", v)
        identifier = f"{entity}_{a}".replace("-", "_").replace(" ", "_")
        if kind == "number" and k < 0.25:
            identifier = identifier.upper()
            statement = r.choice(
                (f"const {identifier}: usize = {v};", f"pub const {identifier}: u32 = {v};", f"static {identifier}: u64 = {v};")
            )
            question = r.choice((f"What is the value of {identifier}?", f"What is {identifier}?"))
            return Fact(kind, entity, statement, question, f"The value of {identifier} is {v}.", v)
        if k > 0.85 and " " not in v:
            statement = r.choice((f"{identifier} = {v}", f"{identifier}: {v}", f"set {identifier} = {v}"))
            question = r.choice((f"What is {identifier}?", f"What is the value of {identifier}?"))
            return Fact(kind, entity, statement, question, f"The value of {identifier} is {v}.", v)
        if k > 0.7:
            key = a.replace(" ", "_")
            form = r.choice(
                (
                    f"[{entity}]\n{key} = {v}",
                    f"{entity}:\n  {key}: {v}",
                    f"{self.day()} INFO {entity}: {a} changed to {v}",
                    f"| {entity} | {a} | {v} |",
                )
            )
            statement, e = form, entity
        else:
            statement = r.choice(
                (
                    f"The {a} of {e} is {v}.",
                    f"The {a} of {e} is {v}.",
                    f"Note: the {a} of {e} is {v}.",
                    f"Remember that the {a} of {e} is {v}.",
                    f"For {e}, the {a} is set to {v}.",
                    f"{e} has {a} {v}.",
                    f"The {a} for {e} was changed to {v}.",
                )
            )
        return Fact(kind, entity, statement, self.question(e, a), f"The {a} of {e} is {v}.", v)

    def question(self, entity, attribute):
        forms = ("What is the {a} of {e}?", "What is the {a} of {e}?", "Which {a} does {e} have?", "Tell me the {a} of {e}.", "{a} of {e}?")
        return self.random.choice(forms).format(a=attribute, e=entity)

    def absent(self, used):
        """A question that the text does not answer: another entity, or an entity of the text with an attribute it does not have."""
        r = self.random
        while True:
            entity = r.choice(sorted(used))[0] if used and r.random() < 0.5 else self.name()
            attribute = r.choice(ATTRIBUTES[r.choice(KINDS)])
            if (entity, attribute) not in used:
                return self.question(entity, attribute)

    def noise(self):
        """A line of a log or of a list of settings that nobody asks about."""
        r, k = self.random, self.random.random()
        if k < 0.6:
            what = r.choice(
                (
                    "started",
                    "stopped",
                    "ready",
                    "connection closed",
                    "retrying",
                    "request done",
                    f"took {r.randint(1, 900)} ms",
                    f"{r.randint(1, 99)} items",
                )
            )
            return f"{self.day()} {r.choice(('INFO', 'INFO', 'DEBUG', 'WARN'))} {self.name()}: {what}"
        return f"{self.word()}_{self.word()} = {self.value(r.choice(('number', 'word', 'version')))}"

    def clock(self):
        r = self.random
        return f"{r.randint(0, 23):02}:{r.randint(0, 59):02}:{r.randint(0, 59):02}"

    def day(self):
        r = self.random
        return f"202{r.randint(3, 6)}-{r.randint(1, 12):02}-{r.randint(1, 28):02} {self.clock()}"
