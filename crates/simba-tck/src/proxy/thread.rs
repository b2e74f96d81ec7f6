//! The thread of the proxy.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fastrand::Rng;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::connection;
use super::shared::Shared;

/// The pause before the next accept when the system has no free sockets.
const OUT_OF_SOCKETS: Duration = Duration::from_millis(10);

/// The thread with the proxy's runtime.
pub(super) struct ProxyThread {
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ProxyThread {
    pub(super) fn start(
        upstream: String,
        seed: u64,
    ) -> io::Result<(Self, oneshot::Receiver<io::Result<SocketAddr>>)> {
        let shared = Arc::new(Shared::new(upstream));
        let (started, address) = oneshot::channel();
        let thread_shared = Arc::clone(&shared);
        let thread = thread::Builder::new().name("fault-proxy".to_owned());
        let thread = Some(thread.spawn(move || run(&thread_shared, seed, started))?);
        Ok((Self { shared, thread }, address))
    }
}

impl Drop for ProxyThread {
    fn drop(&mut self) {
        self.shared.change(|conditions| conditions.stopped = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(shared: &Arc<Shared>, seed: u64, started: oneshot::Sender<io::Result<SocketAddr>>) {
    match open() {
        Ok((runtime, listener)) => {
            let _ = started.send(listener.local_addr());
            runtime.block_on(accept(&listener, shared, Rng::with_seed(seed)));
            // Does not wait for a name lookup that hangs.
            runtime.shutdown_background();
        }
        Err(error) => drop(started.send(Err(error))),
    }
}

fn open() -> io::Result<(Runtime, TcpListener)> {
    let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
    let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
    Ok((runtime, listener))
}

async fn accept(listener: &TcpListener, shared: &Arc<Shared>, mut rng: Rng) {
    let mut watcher = shared.watcher();
    loop {
        tokio::select! {
            biased;
            () = watcher.until(|conditions| conditions.stopped) => return,
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => connection::accept(client, shared, &mut rng),
                Err(_) => sleep(OUT_OF_SOCKETS).await,
            },
        }
    }
}
