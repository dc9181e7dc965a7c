"""The worker of `vllm_cpu_platform`; vLLM imports it by name."""

from vllm_cpu_platform import worker_class

TestCpuWorker = worker_class()
