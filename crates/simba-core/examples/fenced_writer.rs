//! A resource that rejects a stale holder by its fencing token.
//!
//! `cargo run -p simba-core --example fenced_writer`

#![allow(clippy::print_stdout)]

use simba_core::operate::EvictIf;
use simba_core::{FencingToken, MemoryBackend, MutexName, Result, Simba};

/// Stores the greatest token of all writes and rejects smaller ones. A table does the same with
/// `UPDATE … SET token = ? WHERE token <= ?`.
#[derive(Default)]
struct Ledger {
    newest: Option<FencingToken>,
    lines: Vec<String>,
}

impl Ledger {
    fn write(&mut self, token: FencingToken, line: &str) -> bool {
        let fresh = self.newest.is_none_or(|newest| token >= newest);
        if fresh {
            self.newest = Some(token);
            self.lines.push(line.to_owned());
        }
        fresh
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let store = MemoryBackend::new();
    let (one, other) = (Simba::new(store.clone()), Simba::new(store));
    let mut ledger = Ledger::default();

    let stale = one.locker("ledger").lock().await?;
    assert!(ledger.write(stale.token(), "from one"));

    // An operator frees the mutex. The old holder keeps running until its next renewal fails.
    one.operate()?.evict(&MutexName::new("ledger")?, EvictIf::Any).await?;
    let current = other.locker("ledger").lock().await?;
    assert!(ledger.write(current.token(), "from the other"));

    println!("the stale holder still believes: {}", stale.is_held());
    println!("its write is accepted: {}", ledger.write(stale.token(), "too late"));
    assert_eq!(ledger.lines, ["from one", "from the other"]);
    current.release().await
}
