"""The same sentences in Chinese, for `explain --lang zh`: by kind, by flag, with the same numbers."""

from __future__ import annotations

from .incident import Change, Numbers, Plan, Verdict
from .units import gib

_KINDS = {
    "gpu_weights": "模型权重放不进显存",
    "gpu_profile": "启动时的试运行（激活值、多模态编码器）显存不足",
    "gpu_warmup": "采样器或池化预热时显存不足",
    "gpu_kv_none": "没有剩余显存可用于 KV 缓存",
    "gpu_kv_small": "KV 缓存装不下一个最大长度的请求",
    "gpu_kv_alloc": "分配 KV 缓存张量时显存不足",
    "gpu_graph": "捕获 CUDA 图时显存不足",
    "gpu_runtime": "服务运行中显存不足",
    "gpu_neighbour": "启动时显存被其他进程占用",
    "gpu_unstable": "试运行期间空闲显存发生了变化（其他进程正在释放或占用）",
    "gpu_oom": "显存不足，发生在哪个阶段无法确定",
    "host_oom_kill": "主机内存耗尽，内核或内存守护进程杀死了它或它的子进程",
    "host_alloc": "主机内存分配失败",
    "shm_full": "/dev/shm 已满",
    "port_in_use": "端口已被占用",
    "bad_arguments": "vLLM 拒绝了启动参数",
    "bad_model": "模型无法加载",
    "gpu_unavailable": "没有可用的设备或驱动",
    "gpu_fault": "设备或驱动出现故障",
    "engine_crash": "与内存无关的异常或致命信号",
    "hung": "进程还在，但补全请求没有返回",
    "killed": "被信号终止，没有证据表明与内存有关",
    "stopped": "有人要求停止，或系统正在关机",
    "exited": "一次性程序按预期结束",
    "unknown": "没有决定性的证据",
}
_ACTIONS = {
    "adjust": "调整参数后重启",
    "wait": "先等待内存释放，再按原参数启动",
    "retry": "按原参数重试，受重启次数限制",
    "hold": "停下来等人处理",
    "none": "什么也不做",
}
_WHAT_TO_DO = {
    "gpu_weights": "请使用张量并行、量化模型或更大的显卡",
    "gpu_neighbour": "请检查是谁占用了显存",
    "gpu_kv_none": "请换更小的模型、更大的显卡，或增加张量并行",
    "shm_full": "请增大 /dev/shm（例如 --shm-size 或 --ipc=host）",
    "host_oom_kill": "请提高内存上限，或减少主机内存的占用",
    "host_alloc": "请减少主机内存的占用",
    "port_in_use": "请停止占用端口的程序，或更换端口",
    "bad_arguments": "请修改程序的启动参数",
    "bad_model": "请检查模型目录",
    "gpu_unavailable": "请检查显卡、驱动和容器设置",
    "gpu_fault": "请检查硬件，不要在原地重试",
}
_RAISED = {"--gpu-memory-utilization": "提高显存利用率，为 KV 缓存留出空间"}
_LOWERED = {
    "--gpu-memory-utilization": "降低显存利用率，留出缺少的显存",
    "--max-model-len": "缩短到 KV 缓存能容纳的长度",
    "--max-num-seqs": "减少并发序列，降低预热和采样的显存",
    "--max-num-batched-tokens": "减少单批词元，降低激活值的峰值",
    "--swap-space": "减少主机内存的交换空间",
    "--cpu-offload-gb": "减少卸载到主机内存的权重",
}
_OTHER = "按证据中的数字调整"

RULED_OUT = {
    "host_no_kill": "不是主机内存：内核日志里没有杀死它的进程的记录",
    "host_free": "不是主机内存：当时 {total} 中有 {available} 可用",
    "host_stranger": "不是主机内存：内核杀死的是 {name}（pid {pid}），不是它的进程",
    "host_unknown": "不能排除主机内存：没有提供内核日志",
    "gpu_no_word": "不是显存：日志里没有显存分配失败",
    "gpu_none_left": "不是其他进程：没有发现别的进程占用显存",
    "gpu_unknown": "不能排除其他进程：从这里看不到谁占用显存",
    "gpu_kv_built": "不是启动时的 KV 缓存：它已建好，可容纳 {tokens} 个词元",
    "gpu_weights_fit": "不是权重：它们已加载，共 {size}",
    "shm_free": "不是 /dev/shm：当时 {total} 中有 {free} 空闲",
    "no_log": "没有可读的日志：只有结束状态和内核记录可作依据",
}
LABELS = {"phase": "阶段", "next command": "下一次的命令", "proven": "确定", "likely": "很可能", "unknown": "未知"}


def summary(verdict: Verdict) -> str:
    details = _details(verdict.numbers)
    return _KINDS[verdict.kind] + (f"：{details}。" if details else "。")


def _details(numbers: Numbers) -> str:
    parts = []
    if "gpu_index" in numbers:
        parts.append(f"在 GPU {numbers['gpu_index']} 上" + (f"（rank {numbers['rank']}）" if "rank" in numbers else ""))
    if "max_model_len" in numbers and "kv_needed_bytes" in numbers:
        parts.append(f"{numbers['max_model_len']} 个词元的请求需要 {gib(numbers['kv_needed_bytes'])}")
    if "kv_available_bytes" in numbers:
        parts.append(f"KV 缓存可用 {gib(numbers['kv_available_bytes'])}")
    if "estimated_max_model_len" in numbers:
        parts.append(f"大约能容纳 {numbers['estimated_max_model_len']} 个词元")
    if "tried_bytes" in numbers:
        parts.append(f"申请 {gib(numbers['tried_bytes'])}")
    if "requested_bytes" in numbers and "free_bytes" in numbers:
        parts.append(f"需要 {gib(numbers['requested_bytes'])}")
    if "free_bytes" in numbers and "total_bytes" in numbers:
        parts.append(f"{gib(numbers['total_bytes'])} 中有 {gib(numbers['free_bytes'])} 空闲")
    if "limit_bytes" in numbers:
        parts.append(f"内存上限 {gib(numbers['limit_bytes'])}")
    if "shm_required_bytes" in numbers:
        parts.append(f"需要 {gib(numbers['shm_required_bytes'])}，只有 {gib(numbers['shm_free_bytes'])}")
    others = [holder for holder in numbers.get("holders", ()) if holder["owner"] != "own"]
    if others:
        parts.append("占用者：" + "、".join(f"pid {holder['pid']}" for holder in others[:4]))
    return "，".join(parts)


def reason(plan: Plan, verdict: Verdict) -> str:
    action = _ACTIONS[plan.action]
    if plan.action == "hold" and verdict.kind in _WHAT_TO_DO:
        return f"{action}：{_WHAT_TO_DO[verdict.kind]}"
    return action


def why(change: Change, verdict: Verdict) -> str:
    try:
        raised = change.from_ is not None and change.to is not None and float(change.to) > float(change.from_)
    except ValueError:
        return _OTHER
    if raised or verdict.kind == "gpu_kv_none":
        return _RAISED.get(change.flag, _LOWERED.get(change.flag, _OTHER))
    return _LOWERED.get(change.flag, _OTHER)
