use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::Result;

use crate::error::closed;

/// The number from which on those without a user are dropped.
const MAX_IDLE: usize = 8;

/// Keeps one `T` for each length of lease: a session with the store has one length, and contenders share it.
///
/// - Lengths are compared in whole milliseconds.
/// - A `T` has a user while another `Arc` of it exists. One without a user is kept, since the next contender often has
///   the same length. All of them are dropped by the [`get`](Self::get) of a new length that finds eight lengths or more.
/// - All calls share one lock. `start` runs under it, and so does the drop of a `T` without a user: neither may block, or
///   call this `PerLease`.
pub struct PerLease<T> {
    /// By the length in milliseconds; `None` once closed.
    all: Mutex<Option<HashMap<u128, Arc<T>>>>,
}

impl<T> PerLease<T> {
    /// Returns the one for leases of this length. Starts it if there is none.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](simba_core::ErrorKind::Closed) after [`close`](Self::close).
    pub fn get(&self, length: Duration, start: impl FnOnce() -> Arc<T>) -> Result<Arc<T>> {
        let (mut all, length) = (self.all(), length.as_millis());
        let all = all.as_mut().ok_or_else(closed)?;
        if !all.contains_key(&length) && all.len() >= MAX_IDLE {
            all.retain(|_, one| Arc::strong_count(one) > 1);
        }
        Ok(Arc::clone(all.entry(length).or_insert_with(start)))
    }

    /// Returns any one, if there is one.
    pub fn any(&self) -> Option<Arc<T>> {
        self.all().as_ref()?.values().next().map(Arc::clone)
    }

    /// Returns all of them. Every later [`get`](Self::get) fails.
    pub fn close(&self) -> Vec<Arc<T>> {
        self.all().take().unwrap_or_default().into_values().collect()
    }

    fn all(&self) -> MutexGuard<'_, Option<HashMap<u128, Arc<T>>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Default for PerLease<T> {
    fn default() -> Self {
        Self { all: Mutex::new(Some(HashMap::new())) }
    }
}

impl<T> fmt::Debug for PerLease<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerLease").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use simba_core::ErrorKind;

    use super::*;

    fn get(all: &PerLease<u64>, seconds: u64) -> Arc<u64> {
        all.get(Duration::from_secs(seconds), || Arc::new(seconds)).unwrap()
    }

    #[test]
    fn one_is_shared_by_leases_of_its_length_until_it_has_no_user() {
        let all = PerLease::default();
        assert!(all.any().is_none());
        let used = get(&all, 0);
        assert!(Arc::ptr_eq(&used, &get(&all, 0)));
        let idle: Vec<_> = (1..8).map(|seconds| Arc::downgrade(&get(&all, seconds))).collect();
        assert!(idle.iter().all(|idle| idle.upgrade().is_some()), "a few are kept");
        get(&all, 8);
        assert!(idle.iter().all(|idle| idle.upgrade().is_none()));
        assert!(Arc::ptr_eq(&used, &get(&all, 0)));
    }

    #[test]
    fn none_is_returned_after_close() {
        let all = PerLease::default();
        get(&all, 1);
        assert_eq!(all.close(), [Arc::new(1)]);
        let refused = all.get(Duration::from_secs(1), || Arc::new(1)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Closed);
        assert!(all.any().is_none() && all.close().is_empty());
    }
}
