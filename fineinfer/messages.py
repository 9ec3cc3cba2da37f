"""Wire types between api workers, supervisor and engine: msgspec structs as msgpack, never pickle (no torch)."""

from __future__ import annotations

import msgspec

from fineinfer.request import SamplingParams

MAX_MESSAGE_BYTES = 64 << 20


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of every wire type; the class name is the tag."""


# ---------------------------------------------------------------- api worker -> engine


class AddRequest(_Message, kw_only=True, frozen=True):
    """One sequence to generate. ``adapter`` is None for the base model, else ``name`` or ``name@step``."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: str | None = None
    cache_salt: str | None = None  # prefixes are shared only with requests of the same salt
    priority: int = 0  # lower is served earlier; 0 is interactive, above is batch
    arrival_s: float  # time.monotonic() of the api worker; one clock for all processes of a machine


class AbortRequest(_Message, kw_only=True, frozen=True):
    """The client is gone: free everything within one step. Answered by a terminal output with reason ``abort``."""

    request_id: str


class FinishRequest(_Message, kw_only=True, frozen=True):
    """A stop string matched after ``num_tokens`` generated tokens: end the request there with reason ``stop``."""

    request_id: str
    num_tokens: int


class Hello(_Message, kw_only=True, frozen=True):
    """First message of a peer; the engine answers with ``EngineInfo``.

    Attributes:
        link: A name that is new for each connection: what the peer asked for by an earlier one is ended, since nobody
            is left to read it. Empty: nothing is ended.
    """

    link: str = ""


class Ping(_Message, kw_only=True, frozen=True):
    """Health probe; answered from within the engine loop with ``Pong``."""

    sequence: int


# ---------------------------------------------------------------- supervisor -> engine


class LoraSpec(_Message, kw_only=True, frozen=True):
    """Shape of an adapter; names as in PEFT's LoraConfig.

    The patterns give single modules another rank or alpha: a module name (``down_proj``) or a path's end
    (``layers.3.mlp.down_proj``) -> value; of two that match, the first one counts, as in PEFT.
    """

    r: int = 16
    lora_alpha: float = 32.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    use_rslora: bool = False
    lora_dropout: float = 0.0
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}


class EarlyStopping(_Message, kw_only=True, frozen=True):
    """End a job whose evaluation no longer gets better (Together's names)."""

    patience: int = 2  # evaluations in a row without a better loss
    min_delta: float = 0.0  # what counts as better
    warmup_evals: int = 1  # the first ones are not judged


class TrainingSettings(_Message, kw_only=True, frozen=True):
    """Resolved hyperparameters of a job; every ``auto`` is a number by now.

    ``batch_size`` counts examples of one optimizer update; ``gradient_accumulation_steps`` splits them into that
    many micro-batches (0: as few as keep each within ``micro_batch_tokens``). The loss of an update is the sum over
    its trained tokens divided by their number, whatever the split.
    """

    lora: LoraSpec = LoraSpec()
    n_epochs: int = 3
    batch_size: int = 8
    gradient_accumulation_steps: int = 0
    micro_batch_tokens: int = 1024
    learning_rate: float = 2e-4
    lr_scheduler: str = "cosine"  # cosine | linear | constant
    warmup_ratio: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    max_seq_length: int = 2048
    save_steps: int = 0  # 0: at each epoch's end
    min_lr_ratio: float = 0.0  # the schedule ends at this part of the peak learning rate
    eval_steps: int = 0  # 0: at each epoch's end; of a job that has an evaluation set
    early_stopping: EarlyStopping | None = None
    load_best_model_at_end: bool = False  # transformers' name: the evaluation with the lowest loss wins
    seed: int = 42
    recompute: str = "auto"  # auto | never | always: whether layer activations are kept until backward


class StartJob(_Message, kw_only=True, frozen=True):
    """Train a job from its folder; goes on from the newest whole checkpoint there if one exists.

    ``job_dir`` holds ``dataset.safetensors`` (see fineinfer.data.packed) whose SHA-256 is ``dataset_sha256``, and
    ``eval.safetensors``, likewise, if there is an ``eval_sha256``.
    """

    job_id: str
    name: str  # the adapter's served name
    base_model: str
    settings: TrainingSettings
    job_dir: str
    adapters_dir: str
    dataset_sha256: str
    device_s: float = 0.0  # what the job has used of the device before this engine process
    eval_sha256: str | None = None
    init_from: str | None = None  # PEFT folder whose weights a new job begins with
    serve: str = "checkpoint"  # off | checkpoint | live: what is served under ``name`` while the job runs
    max_share: float = 1.0  # of the engine's time, at most, as --train-share-max for all jobs


class PauseJob(_Message, kw_only=True, frozen=True):
    """Checkpoint the last finished update, give the memory back; answered by ``JobEnded`` with status ``paused``."""

    job_id: str


class CancelJob(_Message, kw_only=True, frozen=True):
    """Stop a job in mid-step and give its memory back; answered by ``JobEnded`` with status ``cancelled``."""

    job_id: str


class SetAdapter(_Message, kw_only=True, frozen=True):
    """From now on ``name`` means this version, which also answers to ``name@step``; committed in the store before."""

    name: str
    version: str  # SHA-256 of the adapter's content
    step: int
    directory: str  # PEFT folder, content addressed
    current: bool = True  # False: only register ``name@step``
    pinned: bool = False  # the name's current version keeps its slot


class RemoveAdapter(_Message, kw_only=True, frozen=True):
    """Forget every version of ``name``; requests in flight finish on the version they hold."""

    name: str


class CheckAdapter(_Message, kw_only=True, frozen=True):
    """Read an adapter folder and judge it, without serving it; answered by ``AdapterChecked`` to whoever asked."""

    version: str  # SHA-256 of its content
    directory: str


class ResizeKV(_Message, kw_only=True, frozen=True):
    """Ask for a KV pool of this many slots (test and admin use); granted as far as live tokens and budget allow."""

    num_slots: int


class SetBudget(_Message, kw_only=True, frozen=True):
    """Change the memory budget; the owners follow as fast as running work allows. Too small a budget is ignored."""

    num_bytes: int


class Drain(_Message, kw_only=True, frozen=True):
    """Take no new requests, finish those in flight within ``timeout_s``, checkpoint the job, answer ``Drained``."""

    timeout_s: float


# ---------------------------------------------------------------- engine -> api worker


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the token at one position and of its ``top`` alternatives, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request. ``finish_reason`` set means this is its one terminal message."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first token only; entry 0 is None
    finish_reason: str | None = None
    stop_token_id: int | None = None  # the stop token id that ended it, when not the model's own end token
    adapter_version: str | None = None
    adapter_step: int | None = None
    queue_s: float | None = None  # with the first token: seconds between arrival and first prefill slice
    cached_tokens: int = 0  # with the first token: prompt tokens that the prefix cache had
    training_s: float = 0.0  # seconds of training since the request was queued: at most so much it waited for it
    error_code: str | None = None  # with finish_reason "error": an OpenAI code such as context_length_exceeded
    error_message: str | None = None
    error_param: str | None = None


class Outputs(_Message, kw_only=True, frozen=True):
    """All new tokens of one engine step for one api worker."""

    outputs: list[RequestOutput]


class EngineInfo(_Message, kw_only=True, frozen=True):
    """What the api worker must know of the engine. ``boot_id`` changes with each engine process."""

    boot_id: str
    base_model: str
    max_model_len: int
    max_request_tokens: int  # prompt + output of one request never exceeds this (the pool's maximum)
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    memory_plan: dict[str, int]  # bytes by owner: weights, workspace, adapters, kv_max, kv_now, budget
    max_loras: int = 1  # adapter slots


class Pong(_Message, kw_only=True, frozen=True):
    """Answer to ``Ping``: ``progress`` counts finished layers and slices, so equal values mean a stuck engine."""

    sequence: int
    boot_id: str
    progress: int
    num_running: int
    num_waiting: int


class EngineStats(_Message, kw_only=True, frozen=True):
    """A snapshot, sent to every peer about once a second and on change of state. Counters only grow within a boot."""

    boot_id: str
    time_s: float
    num_running: int
    num_waiting: int
    kv_slots_used: int
    kv_slots_now: int
    kv_slots_max: int
    prompt_tokens_total: int
    generation_tokens_total: int
    num_preemptions_total: int
    memory_bytes: dict[str, int]  # leases by owner
    train_job_id: str | None = None
    train_step: int = 0
    train_total_steps: int = 0
    train_loss: float | None = None
    train_learning_rate: float | None = None
    train_grad_norm: float | None = None
    train_tokens_total: int = 0
    train_tokens_per_s: float = 0.0
    train_eta_s: float | None = None
    train_yielded_s_total: float = 0.0  # time a started update stood still for inference
    kv_slots_cached: int = 0  # slots that only the prefix cache holds; not among those used
    prefix_queries_total: int = 0  # tokens looked up in it
    prefix_hits_total: int = 0  # and found
    train_device_s_total: float = 0.0  # seconds that training slices took
    train_job_device_s: float = 0.0  # seconds that the running job has used in all, engines before this one included
    kept_layers_dropped_total: int = 0
    kv_resizes_total: int = 0
    ladder_steps_total: dict[str, int] = {}  # by rung: hold, drop_kept, offload, split, abort, park, unpark
    adapters: list[str] = []  # names with a current version
    adapter_versions: dict[str, str] = {}  # name -> the version that new requests get
    adapter_tiers: dict[str, str] = {}  # version -> loaded (in a slot) or cpu (host memory); the others are on disk
    adapter_slots: int = 0
    adapter_slots_used: int = 0
    adapter_loads_total: int = 0
    adapter_evictions_total: int = 0
    slice_times_ms: dict[str, float] = {}  # moving averages by slice kind


# ---------------------------------------------------------------- engine -> supervisor


class JobStarted(_Message, kw_only=True, frozen=True):
    """The job's first unit is about to run; ``step`` > 0 after a resume."""

    job_id: str
    step: int
    total_steps: int
    steps_per_epoch: int
    num_trainable_parameters: int


class JobProgress(_Message, kw_only=True, frozen=True):
    """One finished optimizer update; keyed (job, step): a replayed step overwrites."""

    job_id: str
    step: int
    total_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    mean_token_accuracy: float
    trained_tokens: int  # so far, loss-carrying tokens
    processed_tokens: int  # so far, all tokens
    tokens_per_s: float
    eta_s: float


class JobEval(_Message, kw_only=True, frozen=True):
    """One finished evaluation; comes after the ``JobProgress`` and before the ``JobCheckpoint`` of the same step."""

    job_id: str
    step: int
    loss: float  # mean over all trained tokens of the evaluation set
    mean_token_accuracy: float
    num_tokens: int
    best: bool  # whether no earlier one had a loss as low


class JobUsage(_Message, kw_only=True, frozen=True):
    """Seconds of the device that a job has used in all; sent now and then and when the engine lets go of it."""

    job_id: str
    device_s: float


class JobCheckpoint(_Message, kw_only=True, frozen=True):
    """A durable, verified checkpoint; the supervisor commits it to the store and answers with ``SetAdapter``."""

    job_id: str
    name: str
    step: int
    version: str
    directory: str  # adapter folder in PEFT format
    checkpoint_dir: str
    loss: float
    trained_tokens: int
    final: bool


class JobEnded(_Message, kw_only=True, frozen=True):
    """The one terminal message of a job run: ``succeeded``, ``failed``, ``cancelled`` or ``paused``.

    ``paused`` with an ``error_code`` (``disk_full``) was not asked for: the job waits until a user resumes it.
    """

    job_id: str
    status: str
    best_step: int | None = None  # of ``succeeded``: the version to serve, where it is not the last one
    early_stopped: bool = False
    error_code: str | None = None
    error_message: str | None = None


class JobNote(_Message, kw_only=True, frozen=True):
    """Something a user should read in the job's events (memory given back, resume point, …)."""

    job_id: str
    level: str  # info | warn | error
    message: str
    data: dict[str, float] = {}


class AdapterRejected(_Message, kw_only=True, frozen=True):
    """An adapter folder could not be loaded; the name is not served."""

    name: str
    step: int
    message: str


class AdapterChecked(_Message, kw_only=True, frozen=True):
    """Answer to ``CheckAdapter``: ``error`` says why the adapter cannot be served, None that it can."""

    version: str
    error: str | None = None


class Drained(_Message, kw_only=True, frozen=True):
    """Everything ended and is on disk; the engine exits 0 after this."""


# ---------------------------------------------------------------- supervisor <-> api worker


class EngineUp(_Message, kw_only=True, frozen=True):
    """A new engine process is ready."""

    info: EngineInfo


class EngineDown(_Message, kw_only=True, frozen=True):
    """The engine process ended or is stuck: fail every open request now."""

    reason: str
    restarting: bool


class StoreChanged(_Message, kw_only=True, frozen=True):
    """A user action was committed to the store (job created, cancel asked, adapter deleted): look there now."""


class ShuttingDown(_Message, kw_only=True, frozen=True):
    """The server takes no new requests any more."""


ToEngine = (
    AddRequest | AbortRequest | FinishRequest | Hello | Ping | StartJob | PauseJob | CancelJob | SetAdapter
    | RemoveAdapter | CheckAdapter | ResizeKV | SetBudget | Drain
)  # fmt: skip
FromEngine = (
    Outputs | EngineInfo | Pong | EngineStats | JobStarted | JobProgress | JobEval | JobUsage | JobCheckpoint | JobEnded
    | JobNote | AdapterRejected | AdapterChecked | Drained
)  # fmt: skip
ToApi = EngineUp | EngineDown | ShuttingDown
FromApi = Hello | StoreChanged
