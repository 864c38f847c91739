"""The words of the demo's world: attributes and their wordings, kinds of things, filler.

Queries and items are made of them (`demo.synthetic`), and typed questions (`demo.decisions`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """An attribute value, with its wordings before and after a noun; the first is most common."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Category:
    """A family of kinds, with the materials and purposes that make sense for it."""

    name: str
    words: tuple[str, ...]
    kinds: tuple[tuple[str, ...], ...]
    materials: tuple[str, ...]
    purposes: tuple[str, ...]


_COLOURS = (
    Value("red", ("red", "crimson", "scarlet"), ("in red", "in crimson", "in scarlet")),
    Value("blue", ("blue", "navy", "azure"), ("in blue", "in navy", "in azure")),
    Value("green", ("green", "emerald", "olive"), ("in green", "in emerald", "in olive")),
    Value("yellow", ("yellow", "golden"), ("in yellow", "in gold")),
    Value("black", ("black", "charcoal"), ("in black", "in charcoal")),
    Value("white", ("white", "ivory"), ("in white", "in ivory")),
    Value("brown", ("brown", "tan"), ("in brown", "in tan")),
    Value("grey", ("grey", "gray"), ("in grey", "in gray")),
    Value("pink", ("pink", "rose"), ("in pink", "in rose")),
    Value("purple", ("purple", "violet", "lilac"), ("in purple", "in violet", "in lilac")),
    Value("orange", ("orange", "amber"), ("in orange", "in amber")),
)
_MATERIALS = (
    Value("wool", ("wool", "woollen", "knitted"), ("made of wool", "knitted from wool")),
    Value("cotton", ("cotton", "canvas"), ("made of cotton", "made from canvas")),
    Value("leather", ("leather", "suede"), ("made of leather", "made from suede")),
    Value("silk", ("silk", "satin"), ("made of silk", "made from satin")),
    Value("wood", ("wooden", "oak", "pine"), ("made of wood", "made from oak", "made of pine")),
    Value("metal", ("metal", "steel", "iron"), ("made of metal", "made from steel", "of iron")),
    Value("glass", ("glass", "crystal"), ("made of glass", "made from crystal")),
    Value("ceramic", ("ceramic", "porcelain"), ("made of ceramic", "made from porcelain")),
    Value("plastic", ("plastic", "acrylic"), ("made of plastic", "made from acrylic")),
)
_SIZES = (
    Value("small", ("small", "little", "tiny", "compact"), ("in a small size", "that is small")),
    Value("medium", ("medium", "mid-sized"), ("in a medium size", "of average size")),
    Value("large", ("large", "big", "huge"), ("in a large size", "that is big")),
)
_STYLES = (
    Value("modern", ("modern", "contemporary", "sleek"), ("with a modern look",)),
    Value("vintage", ("vintage", "retro", "antique"), ("with a vintage look",)),
    Value("rustic", ("rustic", "farmhouse"), ("in a rustic style",)),
    Value("floral", ("floral", "flowery"), ("with a floral pattern", "with flowers on it")),
    Value("striped", ("striped", "stripy"), ("with stripes", "with a striped pattern")),
)
_PRICES = (
    Value("cheap", ("cheap", "affordable", "budget", "inexpensive"), ("at a low price",)),
    Value("medium-price", ("mid-range", "reasonably priced"), ("at a fair price",)),
    Value("luxury", ("luxury", "premium", "expensive"), ("at a premium price",)),
)
_SEASONS = (
    Value("winter", ("winter", "cold-weather"), ("for winter", "for cold days", "for the snow")),
    Value("summer", ("summer", "warm-weather"), ("for summer", "for hot days", "for the sun")),
    Value("autumn", ("autumn", "rainy-day"), ("for autumn", "for rainy days", "for the rain")),
    Value("spring", ("spring", "springtime"), ("for spring", "for springtime")),
)
_PURPOSES = (
    Value("camping", ("camping", "outdoor"), ("for camping", "for the outdoors", "for hiking")),
    Value("office", ("office", "work"), ("for the office", "for work", "for business")),
    Value("travel", ("travel",), ("for travel", "for long trips", "for holidays")),
    Value("children", ("children's", "kids'"), ("for children", "for kids", "for a toddler")),
    Value("party", ("party",), ("for parties", "for a birthday", "for celebrations")),
    Value("cooking", ("cooking", "chef's"), ("for cooking", "for chefs", "for preparing meals")),
    Value("gardening", ("gardening",), ("for gardening", "for growing plants")),
    Value("sport", ("fitness", "training"), ("for sport", "for exercise", "for workouts")),
    Value("wedding", ("wedding", "bridal"), ("for a wedding", "for brides")),
    Value("bedroom", ("bedroom",), ("for the bedroom", "for a good sleep")),
)
VALUES: dict[str, tuple[Value, ...]] = {
    "price": _PRICES,
    "size": _SIZES,
    "style": _STYLES,
    "colour": _COLOURS,
    "material": _MATERIALS,
    "season": _SEASONS,
    "purpose": _PURPOSES,
}
BY_NAME = {(slot, value.name): value for slot, values in VALUES.items() for value in values}

CATEGORIES = (
    Category(
        "clothing",
        ("clothing", "garment", "clothes"),
        (
            ("scarf", "shawl"),
            ("jumper", "sweater", "pullover"),
            ("jacket", "coat"),
            ("hat", "cap", "beanie"),
            ("shirt", "blouse"),
            ("dress", "gown"),
        ),
        ("wool", "cotton", "leather", "silk"),
        ("camping", "office", "travel", "children", "party", "sport", "wedding"),
    ),
    Category(
        "furniture",
        ("furniture", "piece of furniture"),
        (
            ("chair", "seat"),
            ("table", "desk"),
            ("sofa", "couch", "settee"),
            ("shelf", "bookcase"),
            ("bed", "bedstead"),
            ("cupboard", "cabinet", "wardrobe"),
        ),
        ("wood", "metal", "glass", "plastic", "leather"),
        ("camping", "office", "children", "party", "bedroom", "cooking"),
    ),
    Category(
        "kitchenware",
        ("kitchenware", "kitchen item", "tableware"),
        (
            ("mug", "cup"),
            ("pan", "skillet"),
            ("bowl", "dish"),
            ("kettle", "teapot"),
            ("plate", "platter"),
            ("jug", "pitcher"),
        ),
        ("wood", "metal", "glass", "ceramic", "plastic"),
        ("camping", "office", "travel", "children", "party", "cooking", "wedding"),
    ),
    Category(
        "bag",
        ("bag", "luggage"),
        (
            ("backpack", "rucksack"),
            ("suitcase", "trolley case"),
            ("wallet", "purse"),
            ("handbag", "tote"),
        ),
        ("leather", "cotton", "plastic", "silk"),
        ("camping", "office", "travel", "children", "sport", "wedding", "party"),
    ),
    Category(
        "toy",
        ("toy", "plaything"),
        (
            ("puzzle", "jigsaw"),
            ("doll", "puppet"),
            ("train set", "toy train"),
            ("kite", "stunt kite"),
            ("teddy bear", "stuffed animal"),
        ),
        ("wood", "plastic", "cotton", "metal"),
        ("travel", "children", "party", "camping", "bedroom"),
    ),
    Category(
        "decoration",
        ("decoration", "home decor", "ornament"),
        (
            ("lamp", "lantern"),
            ("clock", "timepiece"),
            ("mirror", "looking glass"),
            ("rug", "carpet"),
            ("vase", "flower vase"),
            ("blanket", "throw", "quilt"),
            ("cushion", "pillow"),
        ),
        ("wool", "cotton", "glass", "ceramic", "wood", "metal", "silk"),
        ("office", "children", "party", "wedding", "bedroom", "camping"),
    ),
    Category(
        "garden equipment",
        ("garden equipment", "garden item", "garden tool"),
        (
            ("spade", "shovel"),
            ("planter", "flowerpot"),
            ("watering can", "sprinkler"),
            ("parasol", "sunshade"),
            ("rake", "leaf rake"),
        ),
        ("wood", "metal", "plastic", "ceramic", "cotton"),
        ("gardening", "camping", "children", "party", "office"),
    ),
)
KINDS = {words[0]: (words, category) for category in CATEGORIES for words in category.kinds}
CATEGORY_OF = {kind: category.name for kind, (_, category) in KINDS.items()}
# Every attribute that an item can state, for numbering.
CONCEPTS = (*(("kind", kind) for kind in KINDS), *BY_NAME)
CATEGORY_WORDS = {category.name: category.words for category in CATEGORIES}
UNCOUNTED = frozenset(
    ("clothing", "clothes", "furniture", "kitchenware", "tableware", "luggage", "home decor")
) | {"garden equipment", "something", "anything"}
ANYTHING = ("something", "anything", "item", "product", "thing")
ADJECTIVE_ORDER = ("price", "size", "style", "colour", "material", "season", "purpose")
SPEC_NAMES = {"colour": "colour", "material": "material", "size": "size", "style": "style"}

ASKING = (
    "I need",
    "I am looking for",
    "looking for",
    "show me",
    "find me",
    "please find",
    "we want",
    "do you have",
    "where can I buy",
    "I want to buy",
    "search for",
    "recommend",
    "can you suggest",
    "what about",
)
QUERY_FILLER = (
    "It is a present for my sister.",
    "It should arrive before Friday.",
    "Thank you for your help.",
    "My old one broke last month.",
    "I hope you still have one in stock.",
    "We moved to a new flat not long ago and many boxes are still closed.",
    "A friend told me about your shop and said that the service is very good.",
    "Please only show what can be delivered.",
    "I have looked in three other shops and did not find anything that I liked.",
    "The last order came quickly and everything was fine.",
    "My neighbour has one and uses it every day.",
    "I would like to see a few choices first, then decide with my family.",
    "Is there a discount for students?",
    "Let me know if you have questions.",
    "I can pay by card or on delivery.",
)
ITEM_FILLER = (
    "new in stock",
    "free delivery",
    "a customer favourite",
    "two year guarantee",
    "easy to clean",
    "top rated",
    "limited offer",
    "ready to ship",
    "from our own workshop",
    "sold by Nordwind",
    "by Acme",
    "order number 4821",
    "ships in two days",
    "with gift box",
)
ITEM_OPENING = ("New:", "Offer:", "Acme", "Nordwind", "Bestseller:", "Now back:", "Top pick:")
INSTRUCTIONS = (
    "You are a careful shopping assistant.",
    "Decide whether the item matches the query.",
    "Answer yes if the item has everything that the query asks for, otherwise answer no.",
    "Judge whether the document meets the requirements given in the request.",
    "The answer can only be yes or no.",
    "Read the query first and then the item.",
    "Do not explain the answer.",
    "An item that misses one of the wishes is not a match.",
    "Ignore spelling, order of words and the seller.",
    "The text of an item may be short or long.",
    "Different words can mean the same thing.",
    "The shop opens at nine and closes at six on every day of the week.",
    "Each result is shown to one customer, who sees only the first page.",
    "Orders that are paid before noon leave the warehouse on the same day.",
    "Returns are accepted within thirty days when the receipt is included.",
    "This text is the same for every request and carries no wish of the customer.",
    "Below you find one query and one item.",
    "Rank the results so that the best ones come first.",
    "The catalogue is updated every night and holds several thousand entries.",
    "Be strict, be brief, and treat every candidate in the same way.",
)
NEUTRAL_WORDS = (  # noqa: SIM905  (a list would take 60 lines)
    "system note customer market street letter number answer question page list report team "
    "city manager meeting result method value point group case part place week year hand school "
    "story fact month right study book word issue side head house service power game line "
    "member law car name body area idea moment force reason research teacher"
).split()
JOINING_WORDS = "the of and to in is that for it with as was on are by this be at from or".split()  # noqa: SIM905
VALUES_OF: dict[str, tuple[str, ...]] = {
    "kind": tuple(KINDS),
    "category": tuple(CATEGORY_WORDS),
    **{slot: tuple(value.name for value in values) for slot, values in VALUES.items()},
}


def wordings(slot: str, value: str) -> tuple[str, ...]:
    """Return the words that name a value on their own, the most common one first."""
    if slot == "kind":
        return KINDS[value][0]
    return CATEGORY_WORDS[value] if slot == "category" else BY_NAME[slot, value].before
