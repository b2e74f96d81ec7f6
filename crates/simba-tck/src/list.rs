//! The list of all cases.

/// Expands to the tests of all cases, or to their registry.
#[doc(hidden)]
#[macro_export]
macro_rules! __cases {
    (@tests $($group:ident { $($case:ident)* })*) => {
        $(mod $group {
            $(#[test]
            fn $case() {
                $crate::run(super::fixture_of_the_suite, $crate::__cases!(@case $group $case));
            })*
        })*
    };
    (@registry $($group:ident { $($case:ident)* })*) => {{
        static CASES: &[$crate::Case] = &[$($($crate::__cases!(@case $group $case)),*),*];
        CASES
    }};
    (@case $group:ident $case:ident) => {
        $crate::Case::new(stringify!($group), stringify!($case), |fixture| {
            Box::pin($crate::cases::$group::$case(fixture))
        })
    };
    ($what:ident) => {
        $crate::__cases! { @$what
            jvm_simba { start restart guard multi_contend schedule }
            exclusion {
                a_held_mutex_is_refused_and_its_holder_named
                a_wait_ends_with_the_release
                a_wait_that_runs_out_names_the_holder
                two_lockers_of_one_handle_exclude_each_other
                a_counter_loses_no_step
                a_locker_does_not_reenter
            }
            renewal {
                a_holder_outlives_its_lease
                renewals_move_the_deadline
                a_busy_callback_delays_no_renewal
                a_min_hold_is_kept
            }
            loss {
                a_dead_holder_is_succeeded
                a_release_is_no_loss
                a_max_hold_ends
                a_leader_that_steps_down_is_succeeded
                work_is_dropped_before_another_holds
                a_release_after_the_loss_is_an_error
                an_evicted_holder_is_notified
            }
            tokens {
                they_grow_with_every_acquisition
                they_grow_for_the_same_contender
                they_stay_through_renewals
                they_grow_past_a_dead_holder
                they_survive_all_shutdowns
                others_see_them
            }
            handover {
                a_release_wakes_the_next
                a_leader_that_stops_wakes_the_next
                waiters_are_served_in_order
                a_woken_waiter_that_is_dropped_wakes_the_next
                a_woken_waiter_that_gives_up_wakes_the_next
                a_try_never_passes_a_waiter
                a_try_leaves_no_trace
                a_dead_waiter_is_skipped
            }
            observer {
                sees_every_owner
                is_woken_by_a_change
                never_contends
                reports_unknown_when_disconnected
                ends_with_its_handle
            }
            names {
                documented_names_work
                odd_names_work_or_are_refused
                wrong_names_are_refused
                names_are_independent
            }
            lifecycle {
                a_shutdown_leaves_nothing
                a_dropped_guard_leaves_nothing
                a_dropped_contention_leaves_nothing
                a_panic_leaves_nothing
                a_shutdown_does_not_affect_other_handles
                a_contention_restarts_under_its_label
                callbacks_alternate
                a_closed_handle_refuses
                close_is_idempotent
            }
            cancellation {
                a_lock_dropped_at_every_await_point_leaves_nothing
                a_wait_dropped_at_every_await_point_leaves_nothing
                a_wait_dropped_at_any_time_leaves_nothing
                an_open_dropped_at_every_await_point_leaves_nothing
                a_contend_dropped_at_every_await_point_can_be_repeated
                a_release_dropped_at_every_await_point_can_be_repeated
            }
            session {
                opening_takes_nothing
                the_first_call_acquires_a_free_mutex
                a_duplicate_id_is_refused
                a_duplicate_id_extends_nothing
                an_unknown_outcome_is_adopted
                a_renewal_keeps_the_token
                a_lapsed_hold_is_acquired_again
                a_late_lapsed_call_renews_the_new_hold
                a_late_renewal_does_not_restore_the_token
                a_stale_token_frees_nothing
                a_release_is_idempotent
                a_release_of_nothing_frees_nothing
                a_release_never_frees_another_holder
                an_inspection_changes_nothing
                hints_begin_with_the_subscription_and_are_kept
                a_dropped_session_leaves_the_queue
            }
            faults {
                a_stalled_holder_is_notified_on_time
                a_short_stall_is_survived
                a_tenure_survives_short_cuts
                a_waiter_survives_an_outage
                a_lost_reply_leaves_no_hold
                a_lost_reply_of_a_release_frees
                a_late_request_is_undone
                an_unreachable_store_is_an_error
                a_restart_of_the_store_is_survived
            }
            load {
                fifty_contenders_take_turns
                two_hundred_mutexes_are_held_at_once
            }
            operate {
                a_list_names_what_is_held
                a_record_shows_the_holder_and_the_waiters
                an_unknown_mutex_is_free
                an_eviction_respects_its_condition
                an_eviction_wakes_the_next
                a_probe_answers
                a_schema_is_applied_again
            }
        }
    };
}
