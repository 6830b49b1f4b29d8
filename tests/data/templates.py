"""Chat templates of published models, cut down to what decides where an answer begins and ends.

Written anew from the published templates' structure: order of the parts, markers, what is trimmed, what the
generation prompt writes, what is dropped from history. Left out: tool schemas, dates, images, error texts. The
revision is named where it is known; "main" means the template that the repository served in 2025.
MARKERS: the special tokens of each; END: those that end a turn when served (the model's generation config).
"""

LLAMA_31 = (  # meta-llama/Llama-3.1-8B-Instruct, main: the system header is always there, texts are trimmed
    "{{ '<|begin_of_text|>' }}"
    "{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content | trim %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n"
    "Today Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}"
    "{% for turn in turns %}"
    "{% if turn.tool_calls %}{% set call = turn.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n{\"name\": \"' + call.name + '\", \"parameters\": ' }}"
    "{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% else %}"
    "{{ '<|start_header_id|>' + ('ipython' if turn.role == 'tool' else turn.role) + '<|end_header_id|>\\n\\n' }}"
    "{{ (turn.content | trim) + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

QWEN3 = (  # Qwen/Qwen3-8B, main: thoughts only behind the newest question; enable_thinking=false writes an empty one
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% set seen = namespace(question=0) %}"
    "{% for turn in messages %}{% if turn.role == 'user' %}{% set seen.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for turn in messages %}"
    "{% if turn.role == 'user' or turn.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}"
    "{% elif turn.role == 'assistant' %}"
    "{% set thought, text = (turn.reasoning_content or ''), turn.content %}"
    "{% if not thought and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > seen.question and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}"
    "{% else %}{{ text }}{% endif %}"
    "{% for call in turn.tool_calls or [] %}"
    "{% if loop.first and text or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}"
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% elif turn.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + turn.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)

GEMMA_3 = (  # google/gemma-3-4b-it, main: the system text opens the first user turn, roles must alternate
    "{{ '<bos>' }}"
    "{% if messages[0].role == 'system' %}"
    "{% set opening = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set opening = '' %}{% set turns = messages %}{% endif %}"
    "{% for turn in turns %}"
    "{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '\\n' }}"
    "{{ (opening if loop.first else '') + (turn.content | trim) + '<end_of_turn>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

HARMONY = (  # openai/gpt-oss-20b, main: an answer ends with <|return|> while it is the newest, with <|end|> later
    "{{ '<|start|>system<|message|>You are ChatGPT.\\n\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{% if messages[0].role in ('system', 'developer') %}"
    "{{ '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% set last = namespace(call='') %}"
    "{% for turn in turns %}"
    "{% if turn.role == 'assistant' and turn.tool_calls %}"
    "{% set later = namespace(final=false) %}"
    "{% for next in turns[loop.index:] %}"
    "{% if next.role == 'assistant' and not next.tool_calls %}{% set later.final = true %}{% endif %}"
    "{% endfor %}"
    "{% if turn.reasoning_content and not later.final %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + turn.reasoning_content + '<|end|>' }}"
    "{% endif %}"
    "{% set last.call = turn.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + last.call + '<|channel|>commentary json<|message|>' }}"
    "{{ turn.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif turn.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{% if turn.reasoning_content %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + turn.reasoning_content + '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + turn.content + '<|return|>' }}"
    "{% elif turn.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + turn.content + '<|end|>' }}"
    "{% elif turn.role == 'tool' %}"
    "{{ '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ turn.content | tojson }}{{ '<|end|>' }}"
    "{% else %}{{ '<|start|>user<|message|>' + turn.content + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

MISTRAL_V3 = (  # mistralai/Mistral-7B-Instruct-v0.3, main: no generation prompt; system text in front of a last question
    "{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{{ '<s>' }}"
    "{% for turn in turns %}"
    "{% if turn.role == 'user' %}"
    "{% if loop.last and system is defined %}{{ '[INST] ' + system + '\\n\\n' + turn.content + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + turn.content + '[/INST]' }}{% endif %}"
    "{% elif turn.role == 'assistant' %}{{ ' ' + (turn.content | trim) + '</s>' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}"
    "{% endif %}{% endfor %}"
)

PHI_4 = (  # microsoft/phi-4, main: nothing stands between the turns
    "{% for turn in messages %}"
    "{{ '<|im_start|>' + turn.role + '<|im_sep|>' + turn.content + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)

DEEPSEEK_V3 = (  # deepseek-ai/DeepSeek-V3, main: every system text in front, bare role markers
    "{% set first = namespace(system='') %}"
    "{% for turn in messages %}{% if turn.role == 'system' %}{% set first.system = turn.content %}{% endif %}{% endfor %}"
    "{{ '<｜begin▁of▁sentence｜>' + first.system }}"
    "{% for turn in messages %}"
    "{% if turn.role == 'user' %}{{ '<｜User｜>' + turn.content }}"
    "{% elif turn.role == 'assistant' %}{{ '<｜Assistant｜>' + turn.content + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)

DEEPSEEK_V31 = (
    # deepseek-ai/DeepSeek-V3.1, as kept in ggml-org/llama.cpp models/templates at 0374c5b6e4c1: the generation
    # prompt opens or closes the thought, and so does every answer; thoughts in the text are cut from history
    "{% set first = namespace(system='') %}"
    "{% for turn in messages %}{% if turn.role == 'system' %}{% set first.system = turn.content %}{% endif %}{% endfor %}"
    "{{ '<｜begin▁of▁sentence｜>' + first.system }}"
    "{% for turn in messages %}"
    "{% if turn.role == 'user' %}{{ '<｜User｜>' + turn.content }}"
    "{% elif turn.role == 'assistant' %}"
    "{{ '<｜Assistant｜></think>' + turn.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)

SMOLLM2 = (  # HuggingFaceTB/SmolLM2-135M-Instruct, main: ChatML with a system text of its own
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CHATML_MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
DEEPSEEK_MARKERS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
MARKERS = {
    LLAMA_31: ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    QWEN3: CHATML_MARKERS,
    GEMMA_3: ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
    HARMONY: ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    MISTRAL_V3: ("<s>", "</s>", "[INST]", "[/INST]"),
    PHI_4: (*CHATML_MARKERS, "<|im_sep|>"),
    DEEPSEEK_V3: DEEPSEEK_MARKERS,
    DEEPSEEK_V31: (*DEEPSEEK_MARKERS, "<think>", "</think>"),
    SMOLLM2: CHATML_MARKERS,
}
END = {
    LLAMA_31: ("<|eot_id|>", "<|eom_id|>"),
    QWEN3: ("<|im_end|>", "<|endoftext|>"),
    GEMMA_3: ("<eos>", "<end_of_turn>"),
    HARMONY: ("<|return|>", "<|call|>"),
    MISTRAL_V3: ("</s>",),
    PHI_4: ("<|im_end|>",),
    DEEPSEEK_V3: ("<｜end▁of▁sentence｜>",),
    DEEPSEEK_V31: ("<｜end▁of▁sentence｜>",),
    SMOLLM2: ("<|im_end|>",),
}
