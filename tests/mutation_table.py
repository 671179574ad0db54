"""Mistakes that the tests must notice: one change of the code each, and the tests that find it.

``make mutants`` makes each of them in a copy of the tree (:mod:`tests.mutation`). The explorer's
broken protocols are others: ``tests/explorer/mutants.py``.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
        file: The file, below ``src``.
        old: Text that occurs exactly once in it.
        new: What stands there instead.
        tests: The file below ``tests`` of which a test must fail, or the test, as pytest takes it.
        survives: Why no test fails; empty where one does.
    """

    file: str
    old: str
    new: str
    tests: str
    survives: str = ""


_CRITEO = "dlrm/test_criteo.py"
_SAME_BITS = "gemm/test_rank_invariance.py::test_numbers_of_ranks_have_the_same_bits[bfloat16-True]"
_EXPLAINED = "cli/test_commands.py::test_explain_needs_no_gpu"
_PROFILES = "test_costs_time.py::test_shipped_profiles_are_what_the_results_say"

MUTANTS = [
    # bench
    Mutant(
        "interlace/bench/report.py",
        "us, name = min(_require(chosen, description, result))",
        "us, name = max(_require(chosen, description, result))",
        "cli/test_report.py::test_summary_takes_the_fastest_of_each_kind",
    ),
    Mutant(
        "interlace/bench/report.py",
        "return 100 * (1 - exposed_us / communication_us) if",
        "return 100 * (1 - exposed_us / self.fused_us) if",
        "cli/test_report.py",
    ),
    Mutant(
        "interlace/bench/report.py",
        "_DISTURBED = 1.15",
        "_DISTURBED = 11.5",
        "gemm/test_sweep.py::test_every_call_counts_and_those_that_cannot_are_said",
    ),
    Mutant(
        "interlace/bench/draws.py",
        "rows *= model.top_k",
        "rows *= 1",
        "gemm/test_sweep.py::test_draws_come_again_and_are_what_models_have",
    ),
    # cli
    Mutant(
        "interlace/cli/gpus.py",
        "world_size=2)",
        "world_size=call.world_size)",
        "cli/test_explain_model.py::test_a_norm_takes_the_same_time_behind_any_sum",
    ),
    Mutant(
        "interlace/costs/time.py",
        'return "guessed" if self.is_guess else "predicted"',
        'return "predicted"',
        "cli/test_explain_model.py::test_what_is_printed",
    ),
    Mutant(
        "interlace/cli/explain.py",
        'f"{us:.0f}", f"{us / min(pairs):.2f}"',
        'f"{us:.0f}", f"{min(pairs) / us:.2f}"',
        _EXPLAINED,
    ),
    Mutant(
        "interlace/cli/gpus.py",
        "return measured | dict(times_us) | measured",
        "return dict(times_us)",
        "cli/test_commands.py::test_explain_takes_an_exact_entry_of_the_table_as_a_call_does",
    ),
    Mutant(
        "interlace/cli/console.py",
        "if sys.stdout.isatty() or",
        "if not sys.stdout.isatty() or",
        "cli/test_commands.py::test_what_is_piped_is_not_folded",
    ),
    Mutant(
        "interlace/cli/trace.py",
        "(size == 0 and name in case.may_be_zero)",
        "size == 0",
        "cli/test_trace.py::test_what_it_refuses",
    ),
    Mutant(
        "interlace_sim/t3/memory.py",
        "most = min(SEGMENT_BYTES, self._capacity * self._column_bytes)",
        "most = SEGMENT_BYTES",
        "sim/t3/test_t3.py::test_no_access_is_larger_than_the_queue",
    ),
    Mutant(
        "interlace/compile/choice.py",
        "        (str(symbol), str(number))",
        "        (str(symbol), str(symbol))",
        "compile/test_models.py::test_inductor_caches_by_the_rows_that_decide",
    ),
    Mutant(
        "interlace/cli/outputs.py",
        "if file not in self.written:",
        "if True:",
        "sim/test_cli_outputs.py::test_only_files_that_were_asked_for_are_made",
    ),
    # comm
    Mutant(
        "interlace/comm/groups/reservation.py",
        "round_up((BUFFERS + 1) * bytes_of_buffer(self.output_bytes), granularity)",
        "round_up(BUFFERS * bytes_of_buffer(self.output_bytes), granularity)",
        "operators/test_reservations.py::test_allocates_what_it_says",
    ),
    Mutant(
        "interlace/comm/groups/symmetric_memory.py",
        "if room is None or nbytes <= room:",
        "if room is None or room:",
        "operators/test_reservations.py::test_allocations_beyond_the_limit",
    ),
    Mutant(
        "interlace/comm/host/agreement.py",
        "remainder = (self.number * _BETWEEN_FAMILIES + size) % _MARKS_OF_SIZES",
        "remainder = (self.number * _BETWEEN_FAMILIES) % _MARKS_OF_SIZES",
        "gemm/test_row_families.py",
    ),
    Mutant(
        "interlace/comm/replay/memory.py",
        "if merged and merged[-1][1] == span[0]:",
        "if merged and merged[-1][1] == span[1]:",
        "comm/test_memory.py",
    ),
    Mutant(
        "interlace/comm/replay/memory.py",
        "first, last = start + self.gap, start + self.gap + nbytes",
        "first, last = start, start + nbytes",
        "comm/test_memory.py::test_free_list_with_gaps",
    ),
    Mutant(
        "interlace/comm/host/descriptors.py",
        "return rank if secrets.compare_digest(shown, bytes.fromhex(token)) else -1",
        "return rank",
        "comm/test_descriptors.py::test_only_one_message_of_each_peer_counts",
    ),
    Mutant(
        "interlace/comm/host/nodes.py",
        "map(order.index, first_ranks)",
        "first_ranks",
        "nodes/test_groups.py::test_nodes_are_numbered_in_the_order_of_ranks",
    ),
    # compile
    Mutant(
        "interlace/compile/producers.py",
        'node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1',
        'node.kwargs.get("beta", 1) != 1',
        "compile/test_patterns.py::test_others_are_left_alone_and_say_why",
    ),
    Mutant(
        "interlace/compile/sent.py",
        'sorted(nodes), "a part of the sum" if is_sum else "the product"',
        '[], "the product"',
        "compile/test_patterns.py::test_others_are_left_alone_and_say_why",
    ),
    Mutant(
        "interlace/compile/sent.py",
        'len(set(waits)) < 2 or add.kwargs.get("alpha", 1) != 1',
        "len(set(waits)) < 2",
        "compile/test_patterns.py::test_pairs_become_operators_with_the_same_results",
    ),
    # costs
    Mutant(
        "interlace/costs/gemm.py",
        "return ceil_div(size, world_size) * (world_size - 1)",
        "return ceil_div(size, world_size) * world_size",
        "test_costs_gemm.py",
    ),
    Mutant(
        "interlace/costs/time.py",
        "link *= self.world_size / 2",
        "link *= 1",
        "test_costs_time.py::test_a_part_that_goes_to_all_goes_to_each_peer_whole",
    ),
    Mutant(
        "interlace/costs/time.py",
        "max(program - memory, 0.0)",
        "max(program, 0.0)",
        "test_costs_time.py::test_few_columns_are_read_by_few_programs",
    ),
    Mutant(
        "interlace/costs/time.py",
        "call.inner, call.inner if call.w_along_k else call.columns",
        "call.inner, call.inner",
        "test_costs_time.py::test_rows_that_do_not_begin_at_sectors",
    ),
    Mutant(
        "interlace/operators/embedding_all_to_all/kernels/sorting.py",
        "(lookup.to(tl.int32) - opening) % LOOKUPS == 0",
        "(lookup.to(tl.int32) - opening) % (2 * LOOKUPS) == 0",
        "operators/embedding_all_to_all/test_lookups.py",
    ),
    Mutant(
        "interlace/bench/machine_profile.py",
        'w_along_k = bool(result.get("w_along_k", True))',
        "w_along_k = True",
        "test_costs_time.py::test_points_of_results",
    ),
    Mutant(
        "interlace/costs/time.py",
        "return flops / flops_per_us + self.product.tile_us",
        "return flops / flops_per_us",
        _PROFILES,
    ),
    Mutant(
        "interlace/costs/network.py",
        "+ self.further_message_us * max(0, messages - 1)",
        "+ 0 * max(0, messages - 1)",
        "test_costs_network.py",
    ),
    Mutant("interlace/costs/network.py", "end += STEP_US", "end += 0.0", "test_costs_network.py"),
    Mutant(
        "interlace/costs/sharding.py",
        "link = pooled * (world_size - 1) / world_size",
        "link = pooled",
        "nn/test_sharding.py",
    ),
    # dlrm
    Mutant("interlace_dlrm/criteo.py", "(stop - start > 2) & ", "(stop - start > 1) & ", _CRITEO),
    Mutant(
        "interlace_dlrm/criteo.py",
        'f"{path}, line {line + number}"',
        'f"{path}, line {line}"',
        _CRITEO,
    ),
    Mutant("interlace_dlrm/criteo.py", "piece.removeprefix(codecs.BOM_UTF8)", "piece", _CRITEO),
    Mutant(
        "interlace_dlrm/criteo.py",
        "(OSError, EOFError, zlib.error)",
        "(OSError, EOFError)",
        _CRITEO,
    ),
    Mutant(
        "interlace_dlrm/criteo.py",
        "values[start == stop] = MISSING",
        "values[start == stop] = 0",
        _CRITEO,
    ),
    Mutant(
        "interlace_dlrm/batches.py",
        "(number + 1) % self.held_out_every",
        "number % self.held_out_every",
        "dlrm/test_batches.py",
    ),
    Mutant(
        "interlace_dlrm/records.py",
        "np.log1p(np.maximum(integers, 0))",
        "np.log1p(np.abs(integers))",
        "dlrm/test_batches.py",
    ),
    Mutant(
        "interlace_dlrm/metrics.py",
        "(count.double() - 1) / 2",
        "count.double() / 2",
        "dlrm/test_metrics.py::test_equal_to_counting_pairs",
    ),
    Mutant(
        "interlace_dlrm/checkpoint.py",
        "return found[max(found)] if found else None",
        "return max(found.values()) if found else None",
        "dlrm/test_training.py::test_only_complete_checkpoints_count",
    ),
    Mutant(
        "interlace_dlrm/checkpoint.py",
        'for pattern in (".step-*.replaced", "step-*")',
        'for pattern in ("step-*",)',
        "dlrm/test_training.py::test_a_kill_between_the_renames_leaves_the_old_checkpoint",
    ),
    # explorer
    Mutant(
        "interlace_explorer/machine.py",
        "self._released[thread] = np.maximum(self._released[thread], released)",
        "...",
        "explorer/test_explorer.py::test_right_kernels",
    ),
    Mutant(
        "interlace_explorer/search.py",
        "raise self._cause(machine, _failure_of(rank, at[rank].detail))",
        "raise _failure_of(rank, at[rank].detail)",
        "explorer/test_explorer.py::test_a_race_is_said_before_the_wrong_result_of_its_schedule",
    ),
    # gemm
    Mutant(
        "interlace/gemm/dispatch.py",
        "if call.operator.is_pair(implementation.name):",
        "if False:",
        "gemm/test_row_families.py",
    ),
    Mutant(
        "interlace/operators/all_gather_gemm/__init__.py",
        "compare_once(call.group, call.family, self.name, call.operands.rows)",
        "pass",
        "operators/test_families.py::test_different_sizes_are_found",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/call.py",
        "compare_once(group, family, operator, tokens)",
        "pass",
        "operators/test_families.py::test_different_sizes_are_found",
    ),
    Mutant(
        "interlace/operators/linear_cross_entropy/schema.py",
        "compare_once(call.group, family, OPERATOR, call.target.numel())",
        "pass",
        "operators/test_families.py::test_different_sizes_are_found",
    ),
    Mutant(
        "interlace/operators/linear_top_k/__init__.py",
        "compare_once(group, family, OPERATOR, len(call.x))",
        "pass",
        "operators/test_families.py::test_different_sizes_are_found",
    ),
    Mutant(
        "interlace/gemm/choice.py",
        "if tabulated.table_ranks == world_size:",
        "if tabulated.is_known:",
        "operators/sequence/test_choice.py",
    ),
    Mutant(
        "interlace/gemm/sequence_dispatch.py",
        "compare_once(group, agreed.family, operator.name, operands.rows)",
        "pass",
        "operators/test_families.py::test_different_sizes_are_found",
    ),
    Mutant(
        "interlace/operators/embedding_all_to_all/operator.py",
        'if implementation.name != "fused":',
        'if implementation.name == "unfused":',
        "operators/test_families.py::test_different_sizes_are_found",
    ),
    Mutant(
        "interlace/operators/embedding_all_to_all/call.py",
        "in_common, first, layout.batch)",
        "in_common, first, 0)",
        "operators/test_families.py::test_different_sizes_are_found",
    ),
    Mutant(
        "interlace/gemm/decision.py",
        "with as_of(agreed.profiles):",
        "with as_of(version()):",
        "gemm/test_row_families.py",
    ),
    Mutant(
        "interlace/gemm/autotune.py",
        "return 1 << max(rows - 1, 0).bit_length()",
        "return rows",
        "gemm/test_autotune.py",
    ),
    Mutant(
        "interlace/gemm/fetch.py",
        "first_row = x.data_ptr() - group.rank * group.stride if in_place",
        "first_row = x.data_ptr() if in_place",
        "operators/all_gather_gemm/test_rows_in_place.py::test_results",
    ),
    Mutant(
        "interlace/gemm/decision.py",
        'shared["the_place_of_x"] = "ordinary memory" if place is None else str(place)',
        "pass",
        "operators/all_gather_gemm/test_rows_in_place.py::test_ranks_whose_rows_lie_elsewhere",
    ),
    Mutant(
        "interlace/gemm/choice.py",
        "default=math.inf) * (1 - profile.margin)",
        "default=math.inf)",
        "compile/test_choice.py",
    ),
    Mutant(
        "interlace/gemm/choice.py",
        "if time is not None and implementation.refusal(terms) is None:",
        "if time is not None:",
        "compile/test_choice.py",
    ),
    Mutant(
        "interlace/gemm/splits.py",
        "return (rows + world_size - 1 - rank) // world_size",
        "return (rows + rank) // world_size",
        "gemm/test_operands.py::test_rows_are_shared_out_as_by_torch",
    ),
    Mutant(
        "interlace/gemm/kernels/tiles.py",
        "inside_w = (inner < end)",
        "inside_w = (inner <= end)",
        "gemm/test_fused.py::test_costs_are_the_counted_traffic",
    ),
    Mutant(
        "interlace/gemm/kernels/tiles.py",
        "return cells, (m < rows)[:, None]",
        "return cells, (m <= rows)[:, None]",
        "gemm/test_fused.py::test_costs_are_the_counted_traffic",
    ),
    Mutant(
        "interlace/gemm/kernels/reduction.py",
        "SENDING.in_tree and WORLD_SIZE > 2",
        "SENDING.in_tree and WORLD_SIZE > 4",
        _SAME_BITS,
    ),
    Mutant(
        "interlace/gemm/implementations/pushed.py",
        "bias = operands.bias if is_whole or",
        "bias = operands.bias if",
        _SAME_BITS,
    ),
    # gin
    Mutant(
        "interlace_gin/engine_cpu.py",
        "start + put.nbytes > window.numel()",
        "start > window.numel()",
        "gin/test_puts.py::test_what_a_card_would_answer_with_damage_is_refused",
    ),
    Mutant(
        "interlace/compile/summary.py",
        "not self._compilations & (self._compilations - 1)",
        "not self._compilations & 0",
        "compile/test_summary.py::test_lines_do_not_grow_with_the_number_of_compilations",
    ),
    Mutant(
        "interlace/clients.py",
        "return self.plugin in names if asked is None else asked",
        "return self.plugin in names or bool(asked)",
        "cli/test_doctor_client.py::test_the_switch",
    ),
    # integrations
    Mutant(
        "interlace/counting.py",
        "self.left[operator, reason] += 1",
        "self.left[operator, reason] += 0",
        "integrations/test_symm_mem.py::test_other_calls_are_left_to_pytorch",
    ),
    Mutant(
        "interlace/integrations/symm_mem.py",
        "return x.movedim(dim, 0).flatten(0, -2)",
        "return x.flatten(0, -2)",
        "integrations/test_symm_mem.py::test_matmul_reduce_scatter",
    ),
    Mutant(
        "interlace/integrations/vllm.py",
        "use_ue8m0 and len(x) >= _FLASHINFER_ROWS",
        "False",
        "integrations/test_vllm.py::test_products_of_vllm",
    ),
    Mutant(
        "interlace/integrations/vllm.py",
        "if operand.shape[-1] in _biased_columns:",
        "if not operand.shape:",
        "integrations/test_vllm.py::test_a_bias_that_other_ranks_do_not_see",
    ),
    Mutant(
        "interlace/integrations/vllm.py",
        'code.co_names == ("super", _ASKED)',
        "code.co_names",
        "integrations/test_vllm.py::test_parameters_that_change_no_call_are_not_asked",
    ),
    # language
    Mutant(
        "interlace/language/tree.py",
        "value = _add(ones, value.to(NODE))",
        "value = _add(ones, value)",
        _SAME_BITS,
    ),
    Mutant(
        "interlace/language/packed.py",
        "(bits + 0x7FF + ((bits >> 12) & 1))",
        "(bits + 0x7FF)",
        "language/test_primitives.py::test_what_half_precision_and_non_numbers_become_in_pairs",
    ),
    Mutant(
        "interlace/language/packed.py",
        "tl.where(value != value, 0x7FC00000, rounded)",
        "rounded",
        "language/test_primitives.py::test_what_half_precision_and_non_numbers_become_in_pairs",
    ),
    # mapped
    Mutant(
        "interlace/mapped/layout.py",
        "max(granularity // itemsize, 2 * rows * columns)",
        "max(granularity // itemsize, 200 * rows * columns)",
        "mapped/test_mapped.py::test_padding_that_would_waste_memory",
    ),
    Mutant(
        "interlace/mapped/layout.py",
        "unit = granularity // math.gcd(granularity, max(rows, 1) * itemsize)",
        "unit = 1",
        "mapped/test_mapped.py::test_rows_fill_whole_pieces",
    ),
    # nn
    Mutant(
        "interlace/nn/linear_cross_entropy_loss.py",
        "vocabulary=self.out_features,\n            sequence_parallel",
        "vocabulary=None,\n            sequence_parallel",
        "nn/test_linear_cross_entropy_loss.py::test_ranks_match_the_full_layer",
    ),
    Mutant(
        "interlace/nn/linear_cross_entropy_loss.py",
        "bias, vocabulary=self.out_features",
        "bias, vocabulary=None",
        "nn/test_linear_cross_entropy_loss.py::test_a_head_chooses_tokens",
    ),
    Mutant(
        "interlace/nn/moe.py",
        "capacity_of(tokens.shape[0], self.top_k",
        "capacity_of(len(tokens), self.top_k",
        "nn/test_modes.py",
    ),
    Mutant(
        "interlace/nn/replicated_gradients.py",
        "factor = 1 / world_size if is_averaged else 1.0",
        "factor = 1.0",
        "nn/test_replicated_gradients.py",
    ),
    Mutant(
        "interlace/nn/replicated_gradients.py",
        "if missing == ranks:",
        "if missing:",
        "nn/test_replicated_gradients.py::test_few_exchanges",
    ),
    Mutant(
        "interlace/nn/replicated_gradients.py",
        "self._complete.update(map(id, holder.parameters()))",
        "self._complete.update(map(id, shards))",
        "nn/test_replicated_gradients.py::test_tensor_and_sequence_parallel_model",
    ),
    Mutant("interlace/nn/sharding.py", "copies=self.copies", "copies=1", "nn/test_sharding.py"),
    Mutant(
        "interlace/nn/sharding.py",
        "state_bytes_per_row=self.state_bytes_per_row",
        "state_bytes_per_row=0",
        "nn/test_sharding.py",
    ),
    Mutant(
        "interlace/nn/sharding.py",
        "(-limit.time(costs[i]), -costs[i].storage_bytes, i)",
        "(limit.time(costs[i]), -costs[i].storage_bytes, i)",
        "nn/test_sharding.py",
    ),
    Mutant(
        "interlace/nn/embedding_shards.py",
        "squares * ((until - edge) / shard.width)",
        "squares",
        "nn/test_embedding_bags.py::test_state_dicts_fit_any_number_of_ranks",
    ),
    # operators
    Mutant(
        "interlace/operators/linear_cross_entropy/kernel.py",
        "slope = 1 + 2 * z_loss * log_sum",
        "slope = 1 + z_loss * log_sum",
        "operators/linear_cross_entropy/test_linear_cross_entropy.py::test_every_form_is_what_pytorch_computes_of_all_logits",
    ),
    Mutant(
        "interlace/operators/linear_cross_entropy/schema.py",
        "is_scaled = x.dtype != torch.float16",
        "is_scaled = x.dtype != torch.float64",
        "operators/linear_cross_entropy/test_linear_cross_entropy.py::test_gradients_in_float16_do_not_vanish_before_they_are_scaled",
    ),
    Mutant(
        "interlace/operators/linear_cross_entropy/schema.py",
        "is_unobserved() or _keeps_graph()",
        "is_unobserved()",
        "operators/linear_cross_entropy/test_linear_cross_entropy.py::test_a_graph_may_be_run_backward_twice",
    ),
    Mutant(
        "interlace/operators/linear_cross_entropy/fused.py",
        ".reshape(-1).contiguous()",
        ".reshape(-1)",
        "operators/linear_cross_entropy/test_linear_cross_entropy.py::test_every_form_is_what_pytorch_computes_of_all_logits",
    ),
    Mutant(
        "interlace/operators/linear_cross_entropy/fused.py",
        "call.w.contiguous(), call.bias",
        "call.w, call.bias",
        "operators/linear_cross_entropy/test_linear_cross_entropy.py::test_the_last_rank_may_have_fewer_columns",
    ),
    Mutant(
        "interlace/operators/embedding_all_to_all/schema.py",
        "if len(sums) == 1:",
        "if len(sums) == 0:",
        "operators/embedding_all_to_all/test_gradients.py::test_a_single_row_is_added_to_its_table_alone",
    ),
    Mutant(
        "interlace/operators/gemm_all_to_all_columns/layout.py",
        "by_first_owner[turned[0][0]]",
        "by_first_owner[0]",
        "operators/sequence/test_sequence.py::test_ranks_take_turns_and_tiles_fit",
    ),
    Mutant(
        "interlace/operators/gemm_all_to_all_columns/__init__.py",
        "columns[:, first:end] += returned",
        "columns[:, first:end] = returned",
        "operators/sequence/test_sequence.py::test_every_form_is_the_product_of_one_rank",
    ),
    Mutant(
        "interlace/operators/all_to_all_gemm/kernel.py",
        "il.nan_unless(arrived.to(tl.int32), total)",
        "total",
        "operators/sequence/test_sequence.py::test_a_peer_that_never_calls",
    ),
    Mutant(
        "interlace/operators/linear_top_k/kernel.py",
        "is_higher = value > highest",
        "is_higher = value >= highest",
        "operators/linear_top_k/test_linear_top_k.py::test_equal_logits_and_none",
    ),
    Mutant(
        "interlace/operators/linear_top_k/call.py",
        "places(x, w, x[:0] if bias is None else bias)",
        "places(x, w, x[:0])",
        "operators/linear_top_k/test_linear_top_k.py::test_a_call_is_known_by_all_that_it_depends_on",
    ),
    Mutant(
        "interlace/gemm/dispatch.py",
        'return "rows" if shape in ((rows,), broadcast) else shape',
        "return shape",
        "gemm/test_forms.py::test_other_rows_are_decided_as_on_the_long_way",
    ),
    Mutant(
        "interlace/gemm/dispatch.py",
        'return "rows" if shape in ((rows,), broadcast) else shape',
        'return "rows"',
        "gemm/test_forms.py::test_scales_that_are_refused_are_so_behind_others",
    ),
    Mutant(
        "interlace/gemm/dispatch.py",
        "**given, **other.of_call()",
        "**given, **decision.of_call()",
        "gemm/test_forms.py::test_other_rows_are_decided_as_on_the_long_way",
    ),
    Mutant(
        "interlace/comm/host/cache.py",
        "                self._decisions.clear()\n                self.replays.forget()",
        "                self._decisions.clear()",
        "gemm/test_forms.py::test_ranks_forget_in_the_same_call_how_calls_run",
    ),
    Mutant(
        "interlace/gemm/dispatch.py",
        "if not operands.rows or group.memory.limit_bytes is not None:",
        "if not operands.rows:",
        "gemm/test_forms.py::test_rows_that_are_refused_are_so_behind_others",
    ),
    Mutant(
        "interlace/gemm/dispatch.py",
        "if _is_to_be_measured(template.impl, other):",
        "if False:",
        "gemm/test_forms.py::test_rows_that_are_to_be_measured_take_the_long_way",
    ),
    Mutant(
        "interlace/gemm/dispatch.py",
        "inner, x.stride(), x.dtype, x_address % _ALIGNMENT,",
        "inner, x.dtype, x_address % _ALIGNMENT,",
        "gemm/test_forms.py::test_what_a_form_tells_apart",
    ),
    Mutant(
        "interlace/gemm/dispatch.py",
        "            group=absent,\n            operands=absent,\n            known=None,",
        "            known=None,",
        "gemm/test_forms.py::test_what_is_remembered_keeps_nothing_alive",
    ),
    Mutant(
        "interlace/gemm/dispatch.py",
        "None if call.epilogue is None else call.epilogue.with_tensors(),",
        "call.epilogue,",
        "gemm/test_forms.py::test_what_is_remembered_keeps_nothing_alive",
    ),
    Mutant(
        "interlace/comm/host/common_profile.py",
        "        known.add((kind, device))",
        "        pass",
        "comm/test_machine_rates.py::test_a_profile_is_settled_once",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/kernels/tiles.py",
        "up_scale = gate_scale + width // SCALED * blocks",
        "up_scale = gate_scale",
        "operators/mixture_of_experts/test_tiles.py",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/kernels/decode.py",
        "tl.where(tl.arange(0, LINES) < LINES // 2, tl.load(of_gate), tl.load(of_up))",
        "tl.where(tl.arange(0, LINES) >= 0, tl.load(of_gate), tl.load(of_up))",
        "operators/mixture_of_experts/test_float8.py::test_matches_float64",
    ),
    Mutant(
        "interlace/comm/runtime/dlpack.py",
        "(max(size, 1) for size in reversed(shape[1:]))",
        "(size for size in reversed(shape[1:]))",
        "comm/test_replays.py::test_new_tensors_on_the_current_gpu_have_pytorchs_strides",
    ),
    Mutant(
        "interlace/comm/host/health.py",
        "if error is not None and launches.value != self._launches_before:",
        "if error is not None and launches.value == self._launches_before:",
        "comm/test_recall.py::test_an_interrupted_replay_breaks_the_group",
    ),
    Mutant(
        "interlace/comm/replay/replays.py",
        "self._remember(operands, work, place, replayable)",
        "self._remember(operands, work, self._place(work, memory), replayable)",
        "comm/test_recall.py"
        "::test_what_moves_on_when_work_is_enqueued_is_remembered_as_it_was_before",
    ),
    Mutant(
        "interlace/comm/replay/replays.py",
        "nbytes <= self.largest or self.kept + nbytes",
        "self.kept + nbytes",
        "comm/test_recall.py"
        "::test_graphs_keep_a_share_of_memory_for_what_calls_take_for_themselves",
    ),
    Mutant(
        "interlace/comm/replay/replays.py",
        "                kept.add(temporary_bytes)\n",
        "                pass\n",
        "comm/test_recall.py"
        "::test_graphs_keep_a_share_of_memory_for_what_calls_take_for_themselves",
    ),
    Mutant(
        "interlace/gemm/launch.py",
        "return y[:, :columns].clone(memory_format=torch.contiguous_format)",
        "return y[:, :columns].contiguous()",
        "operators/test_in_place.py::test_what_is_recorded_changes_results_of_what_is_not"
        "[gemm_reduce_scatter]",
    ),
    Mutant(
        "interlace/operators/gemm_reduce_scatter/__init__.py",
        "if splits is None and not (isinstance(rows, int) and rows % ranks == 0):",
        "if splits is None:",
        "operators/gemm_reduce_scatter/test_gradient.py"
        "::test_equal_rows_are_gathered_without_a_list[6-None]",
    ),
    Mutant(
        "interlace/comm/groups/registration.py",
        "if operand.get_device() != x.get_device():",
        "if False:",
        "comm/test_entrance.py"
        "::test_an_operand_on_another_gpu_is_no_reason_to_look_for_an_earlier_call",
    ),
    Mutant(
        "interlace/comm/replay/tapes.py",
        'spoil("a call is made within another")',
        "pass",
        "comm/test_tapes.py::test_a_call_within_another_spoils_its_recording",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "numbers[4] = (int32_t)dims;",
        "numbers[4] = 0;",
        "comm/test_tapes.py::test_a_tensor_is_not_taken_for_one_of_other_dimensions_and_options",
    ),
    Mutant(
        "interlace/gemm/schema.py",
        "if (x_scale is None) is not (w_scale is None):",
        "if False:",
        "gemm/test_played.py::test_what_is_not_valid_is_refused_behind_a_call_that_was",
    ),
    Mutant(
        "interlace/comm/replay/replays.py",
        "if tapes.recorder() is not None:",
        "if False:",
        "comm/test_recall.py::test_a_call_that_is_recorded_is_to_become_no_graph",
    ),
    Mutant(
        "interlace/comm/runtime/streams.py",
        "            return torch.tensor(numbers, dtype=torch.int64, device=self.device)\n"
        "        self.follow_last_call()\n",
        "            return torch.tensor(numbers, dtype=torch.int64, device=self.device)\n",
        "comm/test_gpus.py::test_what_is_uploaded_is_there_for_later_calls_and_nobody_waits",
    ),
    Mutant(
        "interlace/comm/groups/group.py",
        "        if self.health.broken or not self.may_recall():\n            return None\n"
        "        form, where = known\n",
        "        form, where = known\n",
        "gemm/test_played.py::test_calls_on_two_streams_follow_each_other[gemm_all_reduce-fused]",
    ),
    Mutant(
        "interlace/comm/groups/group.py",
        "if not recorder.is_complete:",
        "if True:",
        "gemm/test_played.py::test_kernels_are_played_rather_than_their_graphs",
    ),
    Mutant(
        "interlace/comm/groups/group.py",
        "            self.has_recorded(reads_in_place=True)\n",
        "            pass\n",
        "gemm/test_played.py::test_graphs_are_played[gemm_all_reduce-fused]",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "if (takes_long_way && ((Tape *)found)->refusals >= MOST_REFUSALS)",
        "if (0)",
        "comm/test_tapes.py::test_what_is_never_so_again_is_recorded_again",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "  tape->refusals = 0;\n",
        "",
        "comm/test_tapes.py::test_what_is_never_so_again_is_recorded_again",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "if (is_known && self->is_public) is_known = put_mode(&key);",
        "",
        "comm/test_tapes.py::test_calls_of_users_are_told_apart_by_the_mode_of_gradients",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "if (step->kind == 'a' && result == Py_None) {",
        "if (0) {",
        "comm/test_tapes.py::test_an_attempt_that_does_nothing_takes_the_long_way",
    ),
    Mutant(
        "interlace/comm/replay/tapes.py",
        """            self.spoil("something has been done before an attempt")\n""",
        "            pass\n",
        "comm/test_tapes.py::test_what_is_not_known_has_no_tape",
    ),
    Mutant(
        "interlace/comm/replay/replays.py",
        "since < _TRIES",
        "since < 4",
        "comm/test_recall.py::test_what_never_becomes_a_graph_is_seldom_tried_again",
    ),
    Mutant(
        "interlace/comm/replay/tapes.py",
        'self.spoil("one tensor is two arguments")',
        "pass",
        "comm/test_tapes.py::test_one_tensor_given_twice_says_nothing_of_two",
    ),
    Mutant(
        "interlace/comm/replay/tapes.py",
        "if type(value) is int and value in self._addresses:",
        "if False:",
        "comm/test_tapes.py::test_what_is_not_known_has_no_tape",
    ),
    Mutant(
        "interlace/comm/replay/tapes.py",
        "before is not None and recorded.is_like(before)",
        "before is not None",
        "comm/test_tapes.py::test_what_is_not_known_has_no_tape",
    ),
    Mutant(
        "interlace/comm/replay/tapes.py",
        "_MOST_WAITING = 64",
        "_MOST_WAITING = 1",
        "comm/test_tapes.py::test_calls_that_take_turns_are_played",
    ),
    Mutant(
        "interlace/comm/replay/tapes.py",
        "weakref.finalize(holder, _close, _held.setdefault(holder, weakref.WeakSet()))",
        "pass",
        "comm/test_tapes.py::test_a_tape_goes_with_its_holder",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "(int32_t)((uintptr_t)address % 16)",
        "0",
        "comm/test_tapes.py::test_another_call_is_not_played",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "         put(key, 'd', strides, dims * sizeof(int64_t));",
        "         1;",
        "comm/test_tapes.py::test_another_call_is_not_played",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "if (is_permitted <= 0 || tape->is_closed) {",
        "if (tape->is_closed) {",
        "comm/test_tapes.py::test_what_must_be_so",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "if (result == NULL && launched) tell_failed(tape);",
        "if (result == NULL) tell_failed(tape);",
        "comm/test_tapes.py::test_an_error_before_a_launch_is_told_to_nobody",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "  for (Py_ssize_t i = 0; i < made; i++) Py_DECREF(values[i + 1]);\n",
        "",
        "comm/test_tapes.py::test_no_references_are_lost_or_kept",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "wants_gradient != NULL && is_as_it_lies(value) && put_tensor(key, value);",
        "wants_gradient != NULL && put_tensor(key, value);",
        "comm/test_tapes.py::test_what_users_give_is_played_where_it_is_as_it_lies",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "type == dtype_type || type == group_type)",
        "type == dtype_type)",
        "comm/test_tapes.py::test_groups_are_told_apart",
    ),
    Mutant(
        "interlace/comm/host/held_memory.py",
        "            with contextlib.suppress(OSError):\n                if os.readlink",
        "            if True:\n                if os.readlink",
        "comm/test_held_memory.py::test_a_file_that_is_closed_meanwhile_hides_no_record",
    ),
    Mutant(
        "interlace/comm/groups/registration.py",
        """        tapes.spoil("an operator is called by another")\n""",
        "",
        "comm/test_tapes.py::test_what_is_not_known_has_no_tape",
    ),
    Mutant(
        "interlace/comm/groups/registration.py",
        "        if tapes.recorder() is not None:\n            return self._run(*args)\n",
        "",
        "gemm/test_played.py::test_calls_of_compiled_programs_are_played_as_a_whole",
    ),
    Mutant(
        "interlace/comm/replay/player.c",
        "!(mode == Py_True && key->has_gradients)",
        "1",
        "gemm/test_played.py::test_gradients_are_not_lost",
    ),
    Mutant(
        "interlace/comm/launching/kernels.py",
        """        tapes.spoil("a kernel is launched for the first time")\n""",
        "",
        "comm/test_launches.py::test_a_launch_of_what_is_compiled_is_a_step_of_a_recorded_call",
    ),
    Mutant(
        "interlace/comm/groups/group.py",
        "            *([self.memory.has_no_tensors()] if reads_in_place else []),\n",
        "",
        "comm/test_tapes.py::test_a_group_plays_calls_only_as_they_were_recorded",
    ),
    Mutant(
        "interlace/gemm/launch.py",
        "            group.has_recorded(reads_in_place=reads_in_place)\n",
        "",
        "comm/test_tapes.py::test_calls_of_programs_are_played",
    ),
    Mutant(
        "interlace/comm/groups/group.py",
        "            self.health.condition(),\n",
        "",
        "comm/test_tapes.py::test_a_group_plays_calls_only_as_they_were_recorded",
    ),
    Mutant(
        "interlace/comm/groups/group.py",
        "            named_condition(self.name),\n",
        "",
        "comm/test_tapes.py::test_a_group_plays_calls_only_as_they_were_recorded",
    ),
    Mutant(
        "interlace/gemm/invariance.py",
        "tapes.depend_on(_conditions)\n",
        "",
        "comm/test_tapes.py::test_a_group_plays_calls_only_as_they_were_recorded",
    ),
    Mutant(
        "interlace/gemm/launch.py",
        "            if name not in names and name not in self._memory",
        "            if name not in names",
        "gemm/test_forms.py::test_what_is_remembered_keeps_nothing_alive",
    ),
    Mutant(
        "interlace/comm/host/held_memory.py",
        "held = None if identity in seen else _read(link)",
        "held = _read(link)",
        "comm/test_held_memory.py::test_a_program_is_shown_while_it_runs",
    ),
    Mutant(
        "interlace/gemm/launch.py",
        "leaves <= 2 or numbers <= _MOST_WAITING",
        "leaves <= 2",
        "gemm/test_rank_invariance.py::test_sums_wait_in_memory_where_registers_do_not_suffice",
    ),
    Mutant(
        "interlace/gemm/kernels/tiles.py",
        "end = first + il.multiple_of(size, TILING.factor)",
        "end = K",
        "gemm/test_rank_invariance.py::test_numbers_of_ranks_have_the_same_bits[bfloat16-False]",
    ),
    Mutant(
        "interlace/gemm/choice.py",
        'return kernel if world_size > 1 or device.type == "cpu" else "unfused"',
        "return kernel",
        "gemm/test_invariance.py::test_a_rank_alone_takes_the_librarys_product",
    ),
    Mutant(
        "interlace/language/tree.py",
        "(2 * tl.program_id(0) + level)",
        "tl.program_id(0)",
        "gemm/test_rank_invariance.py::test_leaves_through_descriptors_have_the_same_bits[0]",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/layout.py",
        " or weight.data_ptr() % 16 != 0",
        "",
        "testing/test_cases.py::test_every_case_is_right[mixture_of_experts-True]",
    ),
    Mutant(
        "interlace/integrations/sglang.py",
        "            return not is_capturing()",
        "            return is_capturing()",
        "integrations/test_sglang.py::test_short_calls_of_an_eager_engine_are_left_alone",
    ),
    Mutant(
        "interlace/comm/launching/kernels.py",
        'COMPILED_WITH = {"enable_fp_fusion": True}',
        "COMPILED_WITH: dict[str, bool] = {}",
        "comm/test_launches.py::"
        "test_products_are_added_without_a_rounding_whatever_tritons_default_is",
    ),
    Mutant(
        "interlace/comm/launching/kernels.py",
        "        if value == 1:\n",
        "        if value == 0:\n",
        "comm/test_launches.py::test_what_a_kernel_is_compiled_for",
    ),
    Mutant(
        "interlace/comm/launching/kernels.py",
        "return kind if -_MIN_INT64 <= value < _MIN_INT64 else",
        "return kind if True else",
        "comm/test_launches.py::test_what_a_kernel_is_compiled_for",
    ),
    Mutant(
        "interlace/costs/time.py",
        "outer = left * (1 - left) / 6",
        "outer = left * (1 - left) / 4",
        "test_costs_time.py::test_corrections_of_any_rows_are_those_of_all_measured_calls",
    ),
    Mutant(
        "interlace/costs/time.py",
        "        if row_bytes % _SECTOR_BYTES:\n",
        "        if row_bytes % _LINE_BYTES:\n",
        "test_costs_time.py::test_rows_that_do_not_begin_at_lines_are_read_more_slowly",
    ),
    Mutant(
        "interlace/gemm/choice.py",
        "corrections.knows(size)",
        "not corrections.knows(size)",
        "gemm/test_row_families.py::test_many_rows_are_chosen_for_by_their_class",
    ),
    Mutant(
        "interlace/gemm/implementations/outputs.py",
        "if not original.is_explicit and original.operands.rows % _REPEATED_ROWS:",
        "if not original.is_explicit and original.operands.rows % 1:",
        "gemm/test_outputs.py::test_outputs_are_for_rows_that_come_again",
    ),
    Mutant(
        "interlace/gemm/launch.py",
        "        relaunch(launch.grid[0], launch.arguments)",
        '        relaunch(1, launch.arguments | {"M": 0})',
        "gemm/test_forms.py::test_calls_that_come_once_go_past_preparations",
    ),
    Mutant(
        "interlace/operators/gemm_all_reduce/normed_launch.py",
        "        relaunch(len(x), _sum_arguments(total, results, eps, *vectors))",
        "        relaunch(len(x) - 1, _sum_arguments(total, results, eps, *vectors))",
        "operators/gemm_all_reduce_norm/test_norm.py::test_calls_of_one_form",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/__init__.py",
        "tensors, world_size, _limit(x, capacity)",
        "tensors, world_size, _limit(x, None)",
        "operators/mixture_of_experts/test_torch.py"
        "::test_a_call_that_comes_again_is_found_before_it_is_validated",
    ),
    Mutant(
        "interlace/comm/runtime/kernel_folder.py",
        "if override or dump or not _thread.is_ours:",
        "if override or dump:",
        "comm/test_kernel_folder.py::test_kernels_stay_where_they_were_kept_at_first",
    ),
    Mutant(
        "interlace/gemm/vocabulary.py",
        "if columns != share:",
        "if columns > share:",
        "operators/linear_top_k/test_linear_top_k.py::test_wrong_arguments_are_refused_on_every_rank",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/kernels/dispatch.py",
        "    larger = tl.maximum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)",
        "    larger = tl.abs(first)",
        "operators/mixture_of_experts/test_float8.py::test_matches_float64",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/kernels/decode.py",
        "            factors, row_factors = next_factors, next_row_factors",
        "            factors = next_factors",
        "operators/mixture_of_experts/test_float8.py::test_matches_float64",
    ),
    Mutant(
        "interlace/gemm/kernels/float8.py",
        "    return tl.where(scale == 0.0, 1.0, scale)",
        "    return scale",
        "operators/mixture_of_experts/test_float8.py::test_matches_float64",
        "on GPUs it does: the interpreter multiplies float8's NaN as 480, which a scale of 0 hides",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/kernels/plan.py",
        "    tl.store(column, tl.cumsum(counts, 0) - counts, mask=block <= blocks)",
        "    tl.store(column, tl.cumsum(counts, 0), mask=block <= blocks)",
        "operators/mixture_of_experts/test_results.py::test_many_blocks_of_slots",
    ),
    Mutant(
        "interlace/operators/gemm_all_to_all_columns/fused.py",
        "entry[FIRST_COLUMN] * itemsize % ALIGNMENT_BYTES == 0",
        "entry[FIRST_COLUMN] % ALIGNMENT_BYTES == 0",
        "operators/sequence/test_sequence.py::test_descriptors_load_from_multiples_of_16_bytes_on",
    ),
    Mutant(
        "interlace/operators/mixture_of_experts/activation.py",
        "up = up.clamp(-self.limit, self.limit)",
        "up = up.clamp(max=self.limit)",
        "operators/mixture_of_experts/test_results.py::test_forms_match_float64",
    ),
    Mutant(
        "interlace/optim.py",
        "(positive and value == 0)",
        "(positive and value < 0)",
        "operators/embedding_all_to_all/test_rejections.py::test_bad_updates",
    ),
    Mutant(
        "interlace/operators/gemm_reduce_scatter/kernel.py",
        "half = epoch & 1",
        "half = epoch & 0",
        "explorer/test_protocols.py::test_every_schedule_is_right[gemm_reduce_scatter, fused]",
        survives="whoever has waited until all senders are done may overwrite what they have read",
    ),
    # optim, registry, documents and units
    Mutant(
        "interlace/operators/embedding_all_to_all/backward.py",
        '"sgd" if kind == "SGD" else "adagrad"',
        '"adagrad" if kind == "SGD" else "sgd"',
        "operators/embedding_all_to_all/test_gradients.py::test_updates_match_float64",
    ),
    Mutant(
        "interlace/registry.py",
        'return name == "unfused" or self.implementation(name).is_stock',
        'return name == "unfused"',
        "compile/test_choice.py",
    ),
    Mutant(
        "interlace/registry.py",
        "if nodes == 1 or name in self.choosers",
        "if nodes <= 2 or name in self.choosers",
        "nodes/test_groups.py::test_an_implementation_that_needs_shared_memory_is_refused_on_all_ranks",
    ),
    Mutant(
        "interlace/documents.py",
        "value if math.isfinite(value) else None",
        "value",
        "sim/test_cli_outputs.py::test_what_is_not_finite_is_null",
    ),
    Mutant(
        "interlace/environment.py",
        "text.lower() in _ON\n",
        "text in _ON\n",
        "test_environment.py",
    ),
    # sim
    Mutant(
        "interlace_sim/engine.py",
        "self._sequence += 1",
        "self._sequence -= 1",
        "sim/test_engine.py",
    ),
    Mutant(
        "interlace_sim/fabric.py",
        "engine.at(end + latency, arrived)",
        "engine.at(end, arrived)",
        "sim/test_step.py::test_all_to_all_at_once_on_a_switch_takes_what_must_leave",
    ),
    Mutant(
        "interlace_sim/topology.py",
        "2 * self.ranks / max(even)",
        "self.ranks / max(even)",
        "sim/test_topology.py",
    ),
    Mutant(
        "interlace_sim/t3/fused.py",
        'self._kind, "read", size, sent',
        'self._kind, "read", size // 2, sent',
        "sim/t3/test_t3.py::test_traffic_of_the_ring",
    ),
    Mutant(
        "interlace_sim/presets/t3_machines/t3-paper.yaml",
        "bytes_per_s: {value: 150.0e9",
        "bytes_per_s: {value: 160.0e9",
        "sim/t3/test_t3.py::test_collectives_of_fast_memory",
    ),
    # testing
    Mutant(
        "interlace/testing/cases/base.py",
        "differs = result != expected if not allowed",
        "differs = result != result if not allowed",
        "testing/test_soak.py::test_one_wrong_element_is_found_and_its_call_named",
    ),
    # tracing
    Mutant(
        "interlace/tracing/clocks.py",
        "(after + before - 2 * between) / 2",
        "(2 * between - after - before) / 2",
        "tracing/test_analysis.py",
    ),
    Mutant(
        "interlace/tracing/events.py",
        "table[:, 2] -= round(rank.offset_ns)",
        "table[:, 2] -= 0",
        "tracing/test_analysis.py",
    ),
    Mutant(
        "interlace/tracing/events.py",
        "start_ns=activity.start_ns - round(rank.offset_ns)",
        "start_ns=activity.start_ns",
        "tracing/test_analysis.py",
    ),
    Mutant(
        "interlace/tracing/account.py",
        "return self.unsent_ns + self.flight_ns",
        "return self.unsent_ns",
        "tracing/test_account.py",
    ),
    # tuning
    Mutant(
        "interlace/tuning/measured.py",
        "files[: max(0, len(files) - MOST_FILES)]",
        "files[:0]",
        "gemm/test_autotune.py::test_the_oldest_are_forgotten",
    ),
    Mutant(
        "interlace/tuning/__init__.py",
        "is_exact=best[0] == 0",
        "is_exact=True",
        "test_tuning.py",
    ),
]
