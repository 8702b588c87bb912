"""llama.cpp, driven through its C interface; the only folder that imports llama_cpp.

native.py      the C functions that the Python bindings leave out
logs.py        llama.cpp's log, sent into `logging`
ggufcheck.py   is this file a whole GGUF? asked before llama.cpp sees it
model.py       weights and their facts
vocabulary.py  text to token ids and back
chat.py        messages to a prompt, through the model's own chat template
taps.py        hidden states of chosen layers, read while llama.cpp computes
context.py     one native context: decode, logits, memory
sampling.py    llama.cpp's sampler chain with an explicit seed
session.py     LlamaStepModel: one sequence in one context, as the engine wants it
native_time.py how long native code itself works, when asked
lanes.py       many sequences at once, for making probe data
facts.py       what can be said of a model without its weights
build.py       what the installed llama.cpp is
"""
