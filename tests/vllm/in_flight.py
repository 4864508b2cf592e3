"""Run by test_vllm.py with vLLM's interpreter: an update arrives while requests are being answered. Prints one line of JSON."""

import json

from logra.rl import vllm_rollout                           # first: it sets what vLLM reads from the environment

import logra
from logra import sync
from logra.rl.learner import load_base


def continued(llm, tokens, before, after, sampling):
    """The largest difference between the log-probabilities that were given to `after` and those that the engine gives now."""
    worst = 0.0
    for prompt, old, new in zip(tokens, before, after):
        fixed = prompt + old[0]
        output = llm.generate([{"prompt_token_ids": fixed + new[0]}], sampling(prompt_logprobs=0, max_tokens=1), use_tqdm=False)[0]
        for place, (token, logprob) in enumerate(zip(*new), len(fixed)):
            worst = max(worst, abs(output.prompt_logprobs[place][token].logprob - logprob))
    return worst


def main():
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = vllm_rollout.VLLM("learner", "exact", "float32", 1)
    llm = engine.llm
    model, tokenizer = load_base()
    sketches = logra.attach(model, 64)
    optimizer = logra.SketchSGD(sketches, relative_step=0.1)
    base = sync.full_weights(model)
    other, _ = load_base()
    other.model.norm.weight.data[0] *= 2                    # which no message carries
    logra.attach(other, 64)
    try:
        refused = engine.apply(sync.full_weights(other)).status
    except sync.SyncError as error:
        refused = error.reason
    engine.apply(base)

    sampling = lambda **more: SamplingParams(**(dict(temperature=0, logprobs=0, detokenize=False, ignore_eos=True, max_tokens=16) | more))
    tokens = [tokenizer(f"{a}+{a}+{a}={2 * a}+{a}={3 * a}\n{a}+{a + 1}+{a}=").input_ids for a in range(20, 28)]
    for i, ids in enumerate(tokens):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": ids}, sampling(output_kind=RequestOutputKind.DELTA))

    def step(seen):
        for output in llm.llm_engine.step():
            answer = output.outputs[0]
            ids, logs = seen[int(output.request_id.split("-")[0])]
            logs += [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids)]
            ids += answer.token_ids

    before, after = ([([], []) for _ in tokens] for _ in range(2))
    while min(len(ids) for ids, _ in before) < 5:
        step(before)
    running = llm.llm_engine.get_num_unfinished_requests()
    for sketch in sketches.values():
        sketch.S_dr.normal_()
    acknowledged = engine.apply(optimizer.step().to_bytes())
    while llm.llm_engine.has_unfinished_requests():
        step(after)
    result = {"requests": len(tokens), "running": running, "other_model": refused, "reset": acknowledged.status == "applied", "version": llm.get_weight_version(),
              "difference": continued(llm, tokens, before, after, sampling)}
    sketches.session = 1                                    # the base again, to see that the two policies differ
    for sketch, weight in zip(sketches.values(), [s.weight for s in logra.attach(load_base()[0], 64).values()]):
        sketch.weight.data.copy_(weight)
    sketches.update = 1
    engine.apply(sync.full_weights(sketches))
    print(json.dumps(result | {"old_difference": continued(llm, tokens, before, after, sampling)}))


if __name__ == "__main__":
    main()
