//! Expands the list of cases to tests and to a registry.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::timeout;

use crate::{Fixture, skips};

/// Time limit for a case.
pub const CASE_LIMIT: Duration = Duration::from_secs(120);

/// A running case.
pub type CaseFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// The result of a case that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The guarantee holds.
    Passed,
    /// Nothing was checked, for this reason: the [`Profile`](crate::Profile) says that the store cannot do it.
    Skipped(&'static str),
}

/// One guarantee and the code that checks it.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// The group of the case: `renewal`.
    pub group: &'static str,
    /// The guarantee in short: `a_holder_outlives_its_lease`.
    pub name: &'static str,
    run: for<'a> fn(&'a dyn Fixture) -> CaseFuture<'a>,
}

impl Case {
    #[doc(hidden)]
    #[must_use]
    pub const fn new(
        group: &'static str,
        name: &'static str,
        run: for<'a> fn(&'a dyn Fixture) -> CaseFuture<'a>,
    ) -> Self {
        Self { group, name, run }
    }

    /// Checks the guarantee on this store. Returns whether it holds, or was not checked.
    ///
    /// # Panics
    ///
    /// If it is broken, with a message that names it. Limit the call to [`CASE_LIMIT`].
    pub async fn run(&self, fixture: &dyn Fixture) -> Outcome {
        match skips::observe((self.run)(fixture)).await {
            None => Outcome::Passed,
            Some(reason) => {
                skips::record(self, reason);
                Outcome::Skipped(reason)
            }
        }
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.group, self.name)
    }
}

/// Returns all cases, for a program that runs them with progress. Tests use [`suite!`](crate::suite).
#[must_use]
pub fn cases() -> &'static [Case] {
    crate::__cases!(registry)
}

/// Some cases that use every kind of call.
const SAMPLE: &[&str] = &[
    "a_wait_ends_with_the_release",
    "a_holder_outlives_its_lease",
    "they_grow_with_every_acquisition",
    "a_release_wakes_the_next",
    "waiters_are_served_in_order",
    "a_tenure_survives_short_cuts",
    "a_lost_reply_leaves_no_hold",
    "a_list_names_what_is_held",
    "a_probe_answers",
];

/// Runs some cases that use every kind of call: for another connection to the same store, such as TLS or a user with
/// fewer permissions, for which all cases would show nothing new.
///
/// # Panics
///
/// If a case panics, or hangs.
pub async fn run_sample(fixture: &dyn Fixture) {
    let cases: Vec<_> = cases().iter().filter(|case| SAMPLE.contains(&case.name)).collect();
    assert_eq!(cases.len(), SAMPLE.len(), "a case of the sample has another name");
    for case in cases {
        let ended = tokio::time::timeout(CASE_LIMIT, case.run(fixture)).await;
        assert!(ended.is_ok(), "broken: {case:?} ends within {CASE_LIMIT:?}");
    }
}

/// Runs one case as a test, on its own runtime.
///
/// # Panics
///
/// If the case panics, or hangs.
#[doc(hidden)]
pub fn run<F: Fixture>(fixture: impl FnOnce() -> F, case: Case) {
    run_within(CASE_LIMIT, fixture, case);
}

/// Runs one case like [`run`], with another limit.
#[doc(hidden)]
#[allow(clippy::print_stdout)]
pub fn run_within<F: Fixture>(limit: Duration, fixture: impl FnOnce() -> F, case: Case) {
    crate::explain_failures();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.unwrap_or_else(|error| panic!("cannot create a runtime: {error}"));
    let ended = runtime.block_on(async {
        // Within the runtime, because a fixture may spawn tasks.
        let fixture = fixture();
        timeout(limit, case.run(&fixture)).await
    });
    runtime.shutdown_background();
    match ended {
        Ok(Outcome::Passed) => {}
        Ok(Outcome::Skipped(reason)) => println!("skipped: {reason}"),
        Err(_) => panic!("the case hangs: {case:?} has not ended after {limit:?}"),
    }
}

/// Expands to one `#[test]` per case, in a module per group.
///
/// Takes an expression of a type that implements [`Fixture`]; each test evaluates it again, within a tokio runtime of
/// the suite. So `cargo test renewal` runs one group, a failure names its guarantee, and a new case reaches every
/// backend by an upgrade. Two suites in one file need modules of their own.
///
/// # Examples
///
/// See the [crate's documentation](crate).
#[macro_export]
macro_rules! suite {
    ($fixture:expr) => {
        fn fixture_of_the_suite() -> impl $crate::Fixture {
            $fixture
        }

        $crate::__cases!(tests);
    };
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_case_is_listed_once() {
        let names: HashSet<_> = cases().iter().map(|case| (case.group, case.name)).collect();
        assert_eq!(names.len(), cases().len());
        assert!(cases().len() >= 90, "the list is too short");
    }

    #[test]
    fn every_case_of_the_sample_exists_once() {
        let sampled = cases().iter().filter(|case| SAMPLE.contains(&case.name));
        assert_eq!(sampled.count(), SAMPLE.len());
    }
}
