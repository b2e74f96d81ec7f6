//! A proxy that answers statements with a chosen error code.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;

const QUERY: u8 = 0x03;
const EXECUTE: u8 = 0x17;

/// Refuses the next statements instead of forwarding them.
#[derive(Clone, Default)]
pub(crate) struct Injector {
    code: Arc<AtomicU16>,
    remaining: Arc<AtomicUsize>,
    injected: Arc<AtomicUsize>,
    /// A text; statements that contain it hang.
    hang_on: Arc<std::sync::Mutex<Option<&'static str>>>,
}

impl Injector {
    /// Starts the proxy in front of `upstream`; returns it and its address.
    pub(crate) async fn start(upstream: SocketAddr) -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let injector = Self::default();
        let serving = injector.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(upstream).await.unwrap();
                tokio::spawn(serving.clone().serve(client, server));
            }
        });
        (injector, address)
    }

    /// Answers the next `count` statements with this error.
    pub(crate) fn refuse(&self, code: u16, count: usize) {
        self.code.store(code, Ordering::SeqCst);
        self.remaining.store(count, Ordering::SeqCst);
    }

    /// Never forwards a statement that contains this text, nor anything after it on the same connection.
    pub(crate) fn hang(&self, text: &'static str) {
        *self.hang_on.lock().unwrap() = Some(text);
    }

    /// Returns the number of statements that were refused or left hanging.
    pub(crate) fn injected(&self) -> usize {
        self.injected.load(Ordering::SeqCst)
    }

    async fn serve(self, client: TcpStream, server: TcpStream) {
        client.set_nodelay(true).unwrap();
        server.set_nodelay(true).unwrap();
        let (from_client, to_client) = client.into_split();
        let (mut from_server, to_server) = server.into_split();
        let to_client = Arc::new(Mutex::new(to_client));
        let replies = Arc::clone(&to_client);
        let downstream = tokio::spawn(async move {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
                if replies.lock().await.write_all(&buffer[..read]).await.is_err() {
                    return;
                }
            }
            let _ = replies.lock().await.shutdown().await;
        });
        let _ = self.forward(from_client, to_server, &to_client).await;
        downstream.abort();
    }

    /// Forwards packets one at a time, or answers them.
    async fn forward(
        &self,
        mut client: OwnedReadHalf,
        mut server: OwnedWriteHalf,
        replies: &Mutex<OwnedWriteHalf>,
    ) -> std::io::Result<()> {
        loop {
            let mut header = [0; 4];
            client.read_exact(&mut header).await?;
            let length = u32::from_le_bytes([header[0], header[1], header[2], 0]) as usize;
            let mut body = vec![0; length];
            client.read_exact(&mut body).await?;
            let statement = header[3] == 0 && matches!(body.first(), Some(&QUERY | &EXECUTE));
            let hang_on = *self.hang_on.lock().unwrap();
            let contains = |text: &str| body.windows(text.len()).any(|part| part == text.as_bytes());
            if statement && hang_on.is_some_and(contains) {
                self.injected.fetch_add(1, Ordering::SeqCst);
                std::future::pending::<()>().await;
            }
            let is_refused = statement
                && self
                    .remaining
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |remaining| remaining.checked_sub(1))
                    .is_ok();
            if is_refused {
                self.injected.fetch_add(1, Ordering::SeqCst);
                replies.lock().await.write_all(&refusal(self.code.load(Ordering::SeqCst))).await?;
            } else {
                server.write_all(&header).await?;
                server.write_all(&body).await?;
            }
        }
    }
}

/// Returns an error packet, as a server sends it.
fn refusal(code: u16) -> Vec<u8> {
    let mut body = vec![0xff];
    body.extend(code.to_le_bytes());
    body.extend(b"#40001injected");
    let mut packet = (body.len() as u32).to_le_bytes()[..3].to_vec();
    packet.push(1);
    packet.extend(body);
    packet
}
