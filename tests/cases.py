"""Cases that people met with other programs of this kind: what happened there, and what happens here.

A test shows the right outcome of a case by its mark, `@pytest.mark.case(NUMBER)`; `docs/robustness.md` is made from
this list and those marks by `scripts/docs`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One case. `reported` names a public report; `untested` says why there is no test, where there is none."""

    number: int
    area: str
    case: str
    elsewhere: str
    here: str
    reported: str
    untested: str = ""


_SPECULATION = "Speculation, vocabularies, going back"
_TAPS = "Hidden states"
_TEMPLATES = "Chat templates and thinking"
_TOKENS = "Tokens, bytes, ends"
_CONTEXT = "Context and memory"
_JOBS = "Batches"
_SEEDS = "Seeds and rounding"
_PROCESS = "Process and terminal"
_FILES = "Model files and offline"
_PROBES = "Probes and ONNX"

CASES = (
    Case(
        1,
        _SPECULATION,
        "draft and target have different vocabularies",
        "drafting ends with one message for every kind of difference",
        "steps are carried over as text; a warning says so",
        "LostRuins/koboldcpp#2325",
    ),
    Case(
        2,
        _SPECULATION,
        "vocabularies that differ in padding only",
        "the pair is refused",
        "they are one vocabulary, and padding is never written",
        "vllm-project/vllm#7252",
    ),
    Case(
        4,
        _SPECULATION,
        "a hybrid or recurrent model, whose memory cannot be cut",
        "speculation is switched off, or fails at the first rejected step",
        "the memory is kept at the start of each step, and comes back from there",
        "ggml-org/llama.cpp#20039",
    ),
    Case(
        5,
        _SPECULATION,
        "two questions with one beginning, on such a model",
        "stale state, or an abort",
        "each run begins with an empty memory, and answers as if it were alone",
        "ggml-org/llama.cpp#28425",
    ),
    Case(
        6,
        _SPECULATION,
        "the same question twice in one process",
        "the second answer is rubbish",
        "the same answer",
        "JamePeng/llama-cpp-python#59",
    ),
    Case(
        8,
        _SPECULATION,
        "a model that cannot go back at all",
        "the server starts, and the first question crashes it",
        "refused when it is loaded, by its name",
        "ml-explore/mlx-lm#1446",
    ),
    Case(
        9,
        _SPECULATION,
        "a step is rejected after a sliding window has moved on",
        "text that differs from the target's own",
        "the text of a run whose steps are all rejected is the target's own",
        "ml-explore/mlx-lm#1427",
    ),
    Case(
        10,
        _SPECULATION,
        "drafting that costs time",
        "a switch for the whole server only; nothing tells",
        "off for one line of a batch with `draft: false`; the run says what was lost",
        "ggml-org/llama.cpp#23052",
    ),
    Case(
        11,
        _SPECULATION,
        "what does `draft` mean in this program?",
        "an object is taken that is not used",
        "the first lines of `--help` say it, and that the text is not the target's own",
        "abetlen/llama-cpp-python#1865",
    ),
    Case(
        12,
        _SPECULATION,
        "the draft ends its answer inside a step",
        "text after the end is handed out",
        "nothing after it is in the text, the counts or the caches",
        "LostRuins/koboldcpp#1276",
    ),
    Case(
        14,
        _SPECULATION,
        "drafted tokens after the end, in the statistics",
        "they count as written",
        "counts, usage and trace agree to the token",
        "vllm-project/vllm#56101",
    ),
    Case(
        15,
        _SPECULATION,
        "the draft's flag, spelt as another program has it",
        "`invalid argument`",
        "`-md`, `--model-draft`, `--draft-model` and `--draft` are one option",
        "atomantic/PortOS#4653",
    ),
    Case(
        16,
        _TAPS,
        "states of a layer: before or after it?",
        "inputs of layers only, from a private interface",
        "states after a layer, equal however its tokens are read, and equal to PyTorch's",
        "ggml-org/llama.cpp#27112",
    ),
    Case(
        17,
        _TAPS,
        "an architecture whose graph has no such states",
        "an assertion ends the process",
        "refused by its name, with what there is",
        "ggml-org/llama.cpp#24541",
    ),
    Case(
        18,
        _TAPS,
        "a probe for Hugging Face's `hidden_states[-2]`",
        "impossible, it is said",
        "the numbers are translated: `[k]` is layer k - 1, `[-1]` is after the norm",
        "JamePeng/llama-cpp-python#118",
    ),
    Case(
        19,
        _TAPS,
        "the state before the output layer",
        "no answer",
        "the last layer can be read, before the norm and after it",
        "abetlen/llama-cpp-python#1695",
    ),
    Case(
        20,
        _TAPS,
        "a probe that was taught at other positions than it is used at",
        "the signal is gone",
        "window and pooling stand in the probe's file, and are applied as they stand",
        "AI-Security-Bootcamp/aisb#34",
    ),
    Case(
        21,
        _TEMPLATES,
        "a template that opens `<think>` by itself",
        "the reasoning is not found",
        "reasoning and answer are told apart",
        "ggml-org/llama.cpp#11861",
    ),
    Case(
        22,
        _TEMPLATES,
        "`enable_thinking` for one question",
        "without effect, or only when the model is loaded",
        "reaches the template, also from a line of a batch; an unknown name is an error",
        "ggml-org/llama.cpp#13160",
    ),
    Case(
        23,
        _TEMPLATES,
        "streamed text against the whole one",
        "a tag is missing in the stream",
        "what is streamed is, together, the whole text",
        "ggml-org/llama.cpp#23320",
    ),
    Case(
        25,
        _TEMPLATES,
        "two messages of the user in a row",
        "an internal error, or a malformed prompt",
        "the template's own words, as an error of that item alone",
        "idiap/sdialog#122",
    ),
    Case(
        27,
        _TOKENS,
        "template and tokenizer both add a first token",
        "two of them, and worse answers",
        "one",
        "abetlen/llama-cpp-python#1501",
    ),
    Case(
        28,
        _TOKENS,
        "a vocabulary that wants a first token, or none",
        "none at all after a repair",
        "one where it is wanted, for draft and target alike",
        "abetlen/llama-cpp-python#1537",
    ),
    Case(
        29,
        _TOKENS,
        "an emoji or a Chinese character split over tokens",
        "it is dropped, or comes out as U+FFFD",
        "whole characters, also where a step ends inside one",
        "abetlen/llama-cpp-python#372",
    ),
    Case(
        31,
        _TOKENS,
        "a model with several tokens that end generation",
        "only one is known, and the text runs on",
        "each of them ends it, in draft and target",
        "unslothai/unsloth#468",
    ),
    Case(
        32,
        _CONTEXT,
        "a question that just fills the context",
        "the limit is one off, and nothing can be written",
        "there is room for one token at least; the error has the numbers",
        "run-llama/llama_index#8046",
    ),
    Case(
        33,
        _CONTEXT,
        "a question longer than the context",
        "it is cut without a word",
        "an error; cut with `--overflow truncate-left` only, and the result says how much",
        "ollama/ollama#4967",
    ),
    Case(
        34,
        _CONTEXT,
        "more context than there is memory",
        "a request for 137 GB, and a crash",
        "4,096 tokens unless asked otherwise; what does not fit is refused before loading, with the numbers",
        "ggml-org/llama.cpp#8101",
    ),
    Case(
        35,
        _CONTEXT,
        "the context is full in the middle of a step",
        "an error from inside NumPy",
        "the run ends at the last token that fits, and says so",
        "abetlen/llama-cpp-python#657",
    ),
    Case(
        36,
        _CONTEXT,
        "a model that cannot be loaded",
        "`Failed to load model` and no reason",
        "memory, architecture and file each have a line of their own",
        "abetlen/llama-cpp-python#2187",
    ),
    Case(
        37,
        _JOBS,
        "a batch is killed in the middle",
        "it starts again from nothing",
        "every finished item is kept; each id is there once in the end",
        "EleutherAI/lm-evaluation-harness#2548",
    ),
    Case(
        38,
        _JOBS,
        "a line that is JSON but no object, or blank, or no UTF-8",
        "the whole batch fails",
        "an error record with the line's number; the others run",
        "headroomlabs-ai/headroom#2316",
    ),
    Case(
        40,
        _JOBS,
        "a failed item in OpenAI's form",
        "status 400 beside `error: null`, read as a success",
        "status and error agree",
        "artefactory/artefactual#332",
    ),
    Case(
        41,
        _JOBS,
        "`params` in place of `body`, ids that occur twice",
        "the file is refused without saying why",
        "the line says what is missing; twins are refused before anything runs",
        "567-labs/instructor#1119",
    ),
    Case(
        42,
        _SEEDS,
        "no seed is given",
        "every process writes the same",
        "a new seed, which the result names",
        "abetlen/llama-cpp-python#1809",
    ),
    Case(
        43,
        _SEEDS,
        "seed 0",
        "it means `random`",
        "it is a seed as any other",
        "abetlen/llama-cpp-python#632",
    ),
    Case(
        44,
        _SEEDS,
        "an item alone, in a batch, and after a resume",
        "other text on a warm server than on a cold one",
        "the same text and seed; in lanes up to rounding, if drafting and guessing pay in both or in neither",
        "ggml-org/llama.cpp#19981",
    ),
    Case(
        45,
        _SEEDS,
        "a step read in batches of another shape",
        "other numbers, and nothing tells",
        "the same states up to rounding; scores that near the threshold are counted in the result",
        "ggml-org/llama.cpp#4479",
    ),
    Case(
        46,
        _PROCESS,
        "Ctrl-C while a long prompt is read",
        "it waits for the next token",
        "ends within the pass; what is there is kept, exit code 130",
        "abetlen/llama-cpp-python#599",
    ),
    Case(
        48,
        _PROCESS,
        "standard error of a run that went well",
        "full of the library's log",
        "empty with `-q`; the log goes to Python's logging",
        "abetlen/llama-cpp-python#1245",
    ),
    Case(
        49,
        _PROCESS,
        "a probe or an input that is missing, a batch whose items all failed",
        "exit code 0",
        "4, 2 and 3",
        "ggml-org/llama.cpp#28095",
    ),
    Case(
        50,
        _PROCESS,
        "output into a file, in a locale without the characters",
        "`charmap codec can't encode`",
        "files are UTF-8 whatever the locale",
        "Aider-AI/aider#4582",
    ),
    Case(
        52,
        _FILES,
        "parts of a split model, joined with `cat` or renamed",
        "`invalid split file`",
        "names the part that is missing, and the pattern of names",
        "ggml-org/llama.cpp#9613",
    ),
    Case(
        53,
        _FILES,
        "half a download, a web page, an LFS pointer, nothing",
        "an error from the depth of the loader",
        "each has a line of its own, before anything is loaded",
        "ggml-org/llama.cpp#6885",
    ),
    Case(
        54,
        _FILES,
        "a model that is here, and no network",
        "the hub is asked all the same",
        "no socket is opened; what is missing is named",
        "abetlen/llama-cpp-python#1801",
    ),
    Case(
        55,
        _FILES,
        "a pull that was interrupted",
        "it starts again, or sizes do not match at the end",
        "it goes on where it was, and says so where it cannot; nothing unchecked gets the final name",
        "huggingface/huggingface_hub#4196",
    ),
    Case(
        56,
        _PROBES,
        "a feature that is 10,000 times as large as others",
        "scaling in float32 shifts the results",
        "`probe convert` compares with a reference, and writes nothing over its tolerance",
        "microsoft/onnxruntime#4130",
    ),
    Case(
        58,
        _PROBES,
        "an export with ZipMap, or with float64 inputs",
        "a type error at run time",
        "taken over where it can be, or refused with the wanted signature",
        "onnx/sklearn-onnx#1183",
    ),
    Case(
        59,
        _PROBES,
        "a fixed batch size, weights in a second file",
        "wrong shapes; a file that nobody finds",
        "runs row by row; a missing file is named",
        "pytorch/pytorch#148886",
    ),
    Case(
        60,
        _PROBES,
        "ONNX Runtime's threads beside llama.cpp's",
        "a pool as large as the machine, spinning",
        "a probe starts no threads",
        "microsoft/onnxruntime#13808",
    ),
    Case(
        61,
        _PROBES,
        "a pickled model in place of a probe",
        "it is run, with whatever is in it",
        "refused; ONNX is all that is read at run time",
        "datalab-to/pdftext#5",
    ),
    Case(
        62,
        "Server",
        "limits, usage and several clients of a server",
        "limits without effect, crashes",
        "there is no server",
        "abetlen/llama-cpp-python#1907",
        untested="this program serves no network",
    ),
)


@cache
def shown_by_case() -> dict[int, list[str]]:
    """`file::function` of every test that carries a case's mark, by the case's number."""
    found: dict[int, list[str]] = {}
    for path in sorted(Path(__file__).resolve().parent.glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case":
                    found.setdefault(ast.literal_eval(mark.args[0]), []).append(f"{path.name}::{function.name}")
    return found
