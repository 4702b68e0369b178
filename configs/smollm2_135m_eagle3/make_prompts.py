"""Writes prompts of four domains as JSONL, the training data of the bundled EAGLE head.

    python configs/smollm2_135m_eagle3/make_prompts.py --num_prompts=8000 --seed=0
    --output=prompts.jsonl

Code and documentation come from Python's own standard library, JSON from random records, prose from
lists of subjects and forms. About a fifth are plain text to continue, the others are messages to an
assistant. With --held_out they are made from modules, kinds of records and subjects that the others
never use.
"""

import ast
import json
import pathlib
import random
import sysconfig
import zlib

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_prompts", 8000, "Number of prompts.")
flags.DEFINE_integer("seed", 0, "Seed of the prompts.")
flags.DEFINE_bool("held_out", False, "Write prompts from held-out material.")
flags.DEFINE_string("output", None, "JSONL file to write.", required=True)

TASKS = """\
adds two numbers; sorts a list; reverses a string; computes a factorial; checks whether a number
is prime; counts the words of a file; parses a CSV file; merges two dictionaries; implements a
stack; implements a binary tree; downloads a web page; finds duplicates; prints the Fibonacci
numbers; validates an email address; reads a configuration; implements a queue; converts
temperatures; computes mean and variance; flattens a nested list; finds a common prefix; caches
results; rotates a matrix; checks balanced brackets; generates passwords; simulates a bank
account; walks a graph; sorts with quicksort; removes vowels; finds the shortest path; groups
anagrams; reads command-line arguments; renames files in a folder; zips a directory; watches a
file for changes; logs to a file; retries a failing call; measures how long a function takes;
draws a bar chart; solves a quadratic equation; multiplies matrices; counts letters; plays
tic-tac-toe; guesses a number; shuffles a deck of cards; converts Roman numerals; parses dates;
formats a table; searches a text with a regular expression; sends an email; queries a database;
serves a web page; hashes a file; compresses a string; counts lines of code; finds the largest
file; checks a palindrome; converts to binary; sums digits; finds the median; removes duplicates
while keeping order; splits a list into chunks; interleaves two lists; evaluates an arithmetic
expression; implements a linked list; implements a priority queue; finds all permutations; encodes
with a Caesar cipher; checks a credit card number; validates a password; converts JSON to CSV;
resizes images; computes compound interest; tracks expenses; manages a to-do list; books
appointments; models an inventory; scrapes headlines; translates Morse code; counts islands in a
grid; solves a sudoku; finds a path through a maze"""

SUBJECTS = """\
photosynthesis; gravity; black holes; a healthy breakfast; climate change; the water cycle;
machine learning; Roman history; vaccines; the stock market; learning the guitar; a trip to Japan;
good sleep; the Renaissance; electric cars; gardening; public speaking; the human heart;
volcanoes; chess; time management; renewable energy; ancient Egypt; coffee; the solar system;
dinosaurs; writing a resume; meditation; the internet; bees; jazz; the Moon; negotiation; plate
tectonics; democracy; dogs; the ocean; budgeting; a lost key; two rival bakers; a lighthouse
keeper; friendship; the first snow; a robot that paints; a city under the sea; an old library; a
talking fox; time travel; a broken clock; moving to a new town; a road trip; forgiveness; a storm
at night; the last train; a letter never sent; the desert; an unexpected visitor; a dragon who is
afraid of fire; the invention of printing; bridges; bread; the printing press; running a marathon;
knitting; whales; the Silk Road; antibiotics; earthquakes; honey; the piano; sharks; tea; rivers;
remote work; interviews; teamwork; small talk; learning a language; a first job; school uniforms;
social media; cooking pasta; camping; birds; sleepwalking; the northern lights; the piano;
architecture; castles; pirates; the circus; a garden in the city; twins; a market on Mars; the
number zero; probability; inflation; supply and demand; taxes; insurance; recycling; plastic;
forests; wolves; cats; horses; ants; spiders; the eye; blood; DNA; evolution; atoms; light; sound;
magnets; electricity; batteries; engines; airplanes; ships; trains; bicycles; maps; compasses;
clocks; calendars"""

FORMS = """\
Explain {} in simple terms.; Write a short story about {}.; What are five interesting facts about
{}?; Write an email to a colleague about {}.; Give me a step-by-step guide to {}.; Summarize the
history of {}.; Write a poem about {}.; What is special about {}?; List the pros and cons of {}.;
Why is {} important?; Tell a child about {}.; Write the opening paragraph of a novel about {}.;
Describe {} in vivid detail.; Write a dialogue between two friends about {}.; What should
everybody know about {}?; Write a speech about {}.; Write a newspaper article about {}.; Imagine a
world without {}. What would change?; Write a diary entry that mentions {}.; Give three arguments
about {}.; Write a letter to a friend about {}.; What questions would you ask an expert on {}?;
Write a review of a book about {}.; Compare {} with {}.; Write a scene in which {} matters.; Plan
a lesson about {}.; What are common misconceptions about {}?; Write a song about {}.; How did
people first learn about {}?; Give advice to a beginner about {}."""

OPENINGS = """\
It was a cold morning when; The old man looked at the sea and; Nobody in the village believed
that; When Clara opened the door,; In the beginning there was; My grandmother used to say that;
The letter arrived on a Tuesday,; For three days the rain; Deep in the forest, a; The history of
science shows that; Once upon a time, in a small town; The captain shouted over the wind:; There
are many reasons why people; As the sun went down, the; She had never seen such a; "You cannot be
serious," said; The first thing to understand is; On the last day of summer,; He counted the coins
twice and; Long before the city was built,; The train was late again, and; Scientists have long
wondered why; What nobody told her was that; In the middle of the night, a; The kingdom had three
rules:; After the war, the family; If you walk along the river,; The dog had been waiting for;
Every year, thousands of people; A good story begins with"""

RECORDS = dict(
    user="id name email age city active",
    product="sku name price currency stock tags",
    order="order_id customer items total status date",
    book="title author year isbn genres rating",
    server="host port protocol enabled region",
    event="event timestamp level message source",
    recipe="name ingredients steps minutes servings",
    employee="id name department salary manager skills",
    song="title artist album duration genre",
    city="name country population latitude longitude",
    task="id title done priority due_date",
    movie="title director year cast rating",
    sensor="sensor_id temperature humidity battery timestamp",
    invoice="number client lines subtotal tax total",
    flight="flight from to departure arrival seats",
    repository="name stars forks language license topics",
    patient="id name age diagnosis doctor admitted",
    ticket="id subject status priority assignee created_at",
    vehicle="plate maker model year color mileage",
    course="code title teacher credits students room",
    hotel="name city rooms price rating amenities",
    match="home away score date stadium",
    planet="name mass radius moons distance",
    animal="name species age weight habitat",
    account="iban owner balance currency opened",
    review="product author stars text date",
    shipment="tracking carrier weight origin destination status",
    house="address rooms area price garden",
)
SURNAMES = ["Smith", "Lee", "Brown", "Garcia", "Okafor", "Novak", "Rossi", "Khan"]
NAMES = [
    "Alice",
    "Bob",
    "Carol",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Ivy",
    "Jack",
    "Kate",
    "Liam",
    "Mia",
    "Noah",
    "Olivia",
    "Peter",
    "Quinn",
    "Rose",
    "Sam",
    "Tina",
    "Uma",
    "Victor",
    "Wendy",
    "Xavier",
    "Yara",
    "Zoe",
]
CITIES = [
    "Paris",
    "London",
    "Tokyo",
    "Berlin",
    "Madrid",
    "Rome",
    "Lagos",
    "Cairo",
    "Toronto",
    "Lima",
    "Oslo",
    "Delhi",
    "Seoul",
    "Sydney",
    "Boston",
    "Denver",
    "Porto",
    "Vienna",
    "Quito",
    "Hanoi",
]
WORDS = [
    "alpha",
    "beta",
    "red",
    "blue",
    "python",
    "sql",
    "rice",
    "salt",
    "drama",
    "ml",
    "web",
    "tools",
    "garden",
    "wifi",
    "pool",
    "urgent",
    "north",
    "cotton",
]
LANGUAGES = [
    "Python",
    "Python",
    "Python",
    "Python",
    "JavaScript",
    "Java",
    "C",
    "C++",
    "Go",
    "Rust",
    "SQL",
    "Bash",
]
DOMAINS = ("code", "json", "docs", "prose")


def entries(text):
    """Entries of a list with semicolons; every fourth is held out."""
    kept = [" ".join(entry.split()) for entry in text.split(";")]
    return [entry for i, entry in enumerate(kept) if (i % 4 == 3) == FLAGS.held_out]


def library():
    """Sources of the standard library, and its documented functions as (name, arguments, docstring,
    source lines)."""
    sources, functions = [], []
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if (
            name.startswith(
                ("site-packages", "test", "idlelib", "lib2to3", "turtledemo", "config-")
            )
            or "/test" in name
        ):
            continue
        if (zlib.crc32(name.encode()) % 8 == 0) != FLAGS.held_out:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        if 400 < len(source) < 400_000:
            sources.append(source)
        lines = source.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(ast.get_docstring(node) or "") > 25:
                arguments = ", ".join(argument.arg for argument in node.args.args)
                source_lines = lines[node.lineno - 1 : node.end_lineno]
                functions.append((node.name, arguments, ast.get_docstring(node), source_lines))
    return sources, functions


class Maker:
    """Prompts of each domain."""

    def __init__(self, rng):
        self.rng = rng
        self.sources, self.functions = library()
        self.tasks, self.subjects, self.openings = (
            entries(TASKS),
            entries(SUBJECTS),
            entries(OPENINGS),
        )
        self.forms = [" ".join(form.split()) for form in FORMS.split(";")]
        self.records = {
            name: keys.split()
            for i, (name, keys) in enumerate(RECORDS.items())
            if (i % 4 == 3) == FLAGS.held_out
        }

    def prompt(self, domain):
        """One prompt: a string, or messages."""
        return getattr(self, domain)(self.rng.random())

    def code(self, u):
        """Python, and a little of other languages."""
        choice = self.rng.choice
        name, arguments, doc, lines = choice(self.functions)
        start = "\n".join(lines[: self.rng.randrange(3, 12)])[:420]
        first = doc.split("\n")[0][:160]
        if u < 0.3:
            return ask(
                choice(
                    [
                        f"Write a Python function `{name}({arguments})` that does the following: "
                        f"{first}",
                        f"Implement this in Python: {first}",
                        f"{first} Show me the code.",
                    ]
                )
            )
        if u < 0.6:
            ends = ["", ".", ", with comments.", " and test it.", " Keep it short."]
            language = choice(LANGUAGES)
            kind = choice(["function", "program", "class", "script"])
            return ask(f"Write a {language} {kind} that {choice(self.tasks)}{choice(ends)}")
        if u < 0.78:
            wishes = ["Complete this Python code", "Explain this code", "Add comments to this code"]
            return ask(f"{choice(wishes)}:\n```python\n{start}\n```")
        return start if u < 0.9 else self.chunk(choice(self.sources), 350)

    def json(self, u):
        """Records: written, extended, extracted from sentences."""
        choice = self.rng.choice
        kind = choice(list(self.records))
        keys = self.rng.sample(
            self.records[kind], self.rng.randrange(3, len(self.records[kind]) + 1)
        )
        records = [{key: self.value(key) for key in keys} for _ in range(self.rng.randrange(1, 4))]
        text = json.dumps(
            records if len(records) > 1 else records[0], indent=choice([None, 2, 2, 4])
        )[:420]
        facts = "; ".join(
            f"{key} {choice(['=', ':', 'is'])} {value}" for key, value in records[0].items()
        )
        if u < 0.25:
            count = self.rng.randrange(2, 8)
            return ask(
                f"Generate a JSON array of {count} {kind}s with the fields {', '.join(keys)}."
            )
        if u < 0.45:
            wish = choice(
                [
                    "Add three more records in the same format.",
                    "Write another one like it.",
                    "Change the values and return the JSON.",
                    "Write a JSON schema for it.",
                ]
            )
            return ask(f"Here is a JSON example:\n{text}\n{wish}")
        if u < 0.8:
            return ask(
                choice(
                    [
                        f"Convert this to JSON: {facts}",
                        f"Extract the {kind} as JSON with the keys {', '.join(keys)}: {facts}",
                        f"Return only JSON. {kind.title()}: {facts}",
                    ]
                )
            )
        return text[: max(60, int(len(text) * 0.7))]

    def docs(self, u):
        """Technical documentation."""
        choice = self.rng.choice
        name, arguments, doc, _ = choice(self.functions)
        text = self.chunk(doc, 300) if len(doc) > 400 else doc[:300]
        if u < 0.2:
            return f"{name}({arguments})\n\n    {text}"
        if u < 0.45:
            return ask(
                f"Write documentation for a function named {name} with the parameters "
                f"{arguments or 'none'}: {doc.splitlines()[0][:160]}"
            )
        if u < 0.7:
            wishes = ["Summarize this documentation", "Rewrite this clearly", "Explain this"]
            return ask(f"{choice(wishes)}:\n{text}")
        library = f"{choice(NAMES).lower()}{choice(['kit', 'lib', 'py', 'flow', 'db', '-cli'])}"
        kind = choice(
            ["README", "tutorial", "reference page", "changelog", "installation guide", "FAQ"]
        )
        return ask(f"Write a {kind} for a tool named {library} that {choice(self.tasks)}.")

    def prose(self, u):
        """Stories, essays, explanations."""
        if u < 0.2:
            return self.rng.choice(self.openings)
        form = self.rng.choice(self.forms)
        return ask(form.format(*self.rng.sample(self.subjects, form.count("{}"))))

    def chunk(self, text, size):
        """A piece that begins at the start of a line."""
        start = self.rng.randrange(max(1, len(text) - size))
        start = text.rfind("\n", 0, start) + 1
        return text[start : start + size]

    def value(self, key):
        """A value that suits a key."""
        choice, below = self.rng.choice, self.rng.randrange
        if key in ("active", "done", "enabled", "garden"):
            return choice([True, False])
        if key in (
            "tags",
            "skills",
            "genres",
            "topics",
            "cast",
            "items",
            "ingredients",
            "steps",
            "lines",
            "amenities",
        ):
            return self.rng.sample(WORDS, below(1, 4))
        if key in (
            "price",
            "total",
            "rating",
            "temperature",
            "humidity",
            "subtotal",
            "tax",
            "latitude",
            "weight",
            "mass",
        ):
            return round(self.rng.uniform(0, 100), 2)
        if key in ("date", "due_date", "admitted", "opened"):
            return f"20{below(15, 27)}-{below(1, 13):02}-{below(1, 29):02}"
        if key in ("timestamp", "departure", "arrival", "created_at"):
            date = f"20{below(15, 27)}-{below(1, 13):02}-{below(1, 29):02}"
            return f"{date}T{below(24):02}:{below(60):02}:00Z"
        if key == "email":
            return f"{choice(NAMES).lower()}@example.com"
        if key in (
            "city",
            "from",
            "to",
            "region",
            "country",
            "origin",
            "destination",
            "home",
            "away",
        ):
            return choice(CITIES)
        if key in (
            "name",
            "customer",
            "author",
            "director",
            "artist",
            "manager",
            "client",
            "doctor",
            "teacher",
            "owner",
            "assignee",
        ):
            return f"{choice(NAMES)} {choice(SURNAMES)}"
        if key in ("title", "album", "subject", "message", "text", "address"):
            return f"{choice(self.subjects).title()} {below(1, 100)}"
        return below(1, 9999)


def ask(text):
    """A message of the user."""
    return [{"role": "user", "content": text}]


def main(argv):
    """Writes the prompts."""
    del argv
    maker = Maker(random.Random(FLAGS.seed))
    with open(FLAGS.output, "w", encoding="utf-8") as file:
        for i in range(FLAGS.num_prompts):
            domain = DOMAINS[i % len(DOMAINS)]
            prompt = maker.prompt(domain)
            row = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
            file.write(json.dumps({**row, "domain": domain}) + "\n")


if __name__ == "__main__":
    app.run(main)
