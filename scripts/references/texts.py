"""The strings, prompts and chats of the SmolLM2 references: awkward for a tokenizer, varied for a model."""

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"  # four people joined by zero-width joiners
THUMB = "\U0001f44d\U0001f3fd"  # with a skin tone
FLAG = "\U0001f1e9\U0001f1ea"  # two regional indicators
ZALGO = "Z\u0301\u0302\u0316a\u0308\u0330l\u0334\u030bgo"

STRINGS = [
    "",
    " ",
    "  ",
    "   a",
    "a   ",
    "\t",
    "\t\tx",
    "\n",
    "\n\n\n",
    "\r\n",
    "a\r\nb\rc\n",
    "  \n  \t\n ",
    " " * 17 + "deep",
    "\u00a0non\u00a0breaking\u2003em\u3000wide",
    "\u200bzero\u200bwidth\ufeff",
    "0",
    "1234567890",
    "3.14159, 2,718,281 and 1e-10",
    "v1.2.3-rc4",
    "2024-02-29T23:59:60Z",
    "007 0x1F 1_000",
    "\u0661\u0662\u0663 \u096a\u096b\u096c \uff11\uff12\uff13 \u00bd \u00b2 \u2167",
    "word1word22word333",
    "I'm you're he'll they'd we've it's DON'T",
    "\u2018curly\u2019 \u201cquotes\u201d \u2013 dash \u2014 dash \u2026",
    "snake_case camelCase SCREAMING_CASE kebab-case",
    "def f(x):\n    if x > 0:\n\t\treturn x ** 2  # why\n    return -x\n",
    "for(int i=0;i<10;++i){a[i]=b[i]^0xFF;}",
    '<div class="a&amp;b">&lt;x&gt;</div>',
    '{"key": [1, 2.5, null, true], "s": "\\u00e9\\n"}',
    "https://example.org/a/b?c=d&e=%20f#g",
    "user@example.org",
    "$\\alpha \\le \\frac{1}{2}$",
    "!!!???...;;;:::",
    "@#$%^&*()_+-=[]{}|\\;:'\",.<>/?`~",
    "caf\u00e9 na\u00efve \u00fcber \u00c5ngstr\u00f6m \u0142\u00f3d\u017a",
    "cafe\u0301 nai\u0308ve",
    ZALGO,
    "\u0110\u1ec1 t\u00e0i ti\u1ebfng Vi\u1ec7t",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u039a\u03cc\u03c3\u03bc\u03b5",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6211\u559c\u6b22\u5403\u82f9\u679c",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3068\u30ab\u30bf\u30ab\u30ca",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\u202eright to left\u202c and back",
    "\U0001f600",
    f"hi {FAMILY} there",
    f"{THUMB}{FLAG}\u2764\ufe0f\u0031\ufe0f\u20e3",
    "\U0001d49c\U0001d4b7\U0001d4b8 \U00020000\U0002a6d6 \U0001f9ff",
    "\x00null\x01\x07\x1b[31mred\x7f",
    "\u0643\u064e\u064a\u0652\u0641\u064e",
    "bytes without a token \U00040000 \U000c0000 \u07ff",
    "\ufffd replacement \ue000 private \U0010ffff last",
    "<|im_start|>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|> c",
    "<|im_start|> 12<|im_end|><|im_end|>",
    "<|im_start <|im_end|| > <|IM_END|> <|unknown|>",
    "<repo_name>a/b<file_sep><filename>x.py<jupyter_code>1<empty_output>",
    "<s></s>[INST]<pad><unk>",
    "The quick brown fox jumps over the lazy dog.",
    " leading and trailing ",
    "supercalifragilisticexpialidocious" * 2,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]

LONG_ENGLISH = """\
The lighthouse stood at the end of a long spit of shingle, and for most of the year nobody came to it but the \
keeper, the postman and the gulls. The keeper was a woman called Ada Merrow, who had taken the post when her \
father grew too old to climb the stairs, and who had kept a diary every day since. She wrote about the weather \
first, because the weather decided everything else: whether the supply boat could land, whether the fog signal \
had to be wound, whether she would sleep. Then she wrote about ships. She knew most of them by their lights, \
and some of them by the sound of their engines, and she gave those that she did not know names of her own.

On the third of November the wind went round to the north-east and the sea began to come over the causeway. \
Ada carried the oil up before dark, trimmed the lamp and sat down with her diary. At ten past nine she saw a \
light where no light should have been, low on the water, between the reef and the shore. It did not move as a \
ship moves. It rose, stood still, and went out; and a minute later it rose again, a little nearer. She put \
down her pen, took the glass from its hook and opened the door to the gallery. The wind took it out of her \
hand. What she saw through the glass was a small open boat with no mast and no oars, and in the stern of it, \
holding a lantern above his head,"""

CODE = '''import heapq


def shortest_path(graph, source, target):
    """Return the length of the shortest path from source to target, or None."""
    queue = [(0, source)]
    seen = set()
    while queue:
        distance, node = heapq.heappop(queue)
        if node == target:
            return distance
        if node in seen:
            continue
        seen.add(node)
        for neighbour, weight in graph[node].items():
'''

# Name to text, or to the messages of a chat (rendered with the template, generation prompt added).
PROMPTS = {
    "one_token": "The",
    "one_special": "<|im_start|>",
    "two_tokens": "Once upon",
    "capital": "The capital of France is",
    "newline": "\n",
    "digits": "1 2 3 5 8 13 21 34 55",
    "pi": "3.14159265358979",
    "sum": "Q: What is 17 + 25?\nA:",
    "table": "| year | city | people |\n|---|---|---|\n| 1990 | Oslo | 458364 |\n| 2000 |",
    "code": CODE,
    "json": '{"name": "Ada Lovelace", "born": 1815, "known_for": [',
    "html": "<!DOCTYPE html>\n<html>\n<head>\n<title>",
    "list": "Shopping list:\n1. Apples\n2. Bread\n3.",
    "french": "Il \u00e9tait une fois, dans un petit village,",
    "russian": "\u0421\u0442\u043e\u043b\u0438\u0446\u0430 \u0420\u043e\u0441\u0441\u0438\u0438 \u2014",
    "chinese": "\u4e2d\u56fd\u7684\u9996\u90fd\u662f",
    "arabic": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643",
    "emoji": f"I love pizza \U0001f355 and music \U0001f3b5 {FAMILY}",
    "repeat": "banana " * 24,
    "chat_capital": [{"role": "user", "content": "What is the capital of France?"}],
    "chat_system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "Give me a word that rhymes with 'cat'."},
        {"role": "assistant", "content": "Hat."},
        {"role": "user", "content": "Another one, and a sentence that uses both."},
    ],
    "english": "A paged cache keeps the keys and values of every token in pages of fixed size, so that a sequence may "
    "grow without its memory being moved. When two requests begin with the same words, they can",
    "long_english": LONG_ENGLISH,
}

# Messages, and whether the header of an assistant's answer is added.
CHATS = [
    ([{"role": "user", "content": "Hello"}], True),
    ([{"role": "user", "content": "Hello"}], False),
    (PROMPTS["chat_system"], True),
    (
        [
            {"role": "user", "content": "  count to 12\n"},
            {"role": "assistant", "content": "1 2 3\n\n"},
            {"role": "user", "content": ""},
        ],
        True,
    ),
    ([{"role": "user", "content": f"{FAMILY} \u4f60\u597d 42"}, {"role": "assistant", "content": "\U0001f600"}], False),
    ([{"role": "system", "content": ""}, {"role": "user", "content": "a <|im_end|> b {{ x }} {% y %}"}], True),
]
