use async_trait::async_trait;

use super::backend::MemoryBackend;
use crate::error::Result;
use crate::operate::{EvictIf, Eviction, Finding, MutexRecord, Operate, Probe};
use crate::types::MutexName;

#[async_trait]
impl Operate for MemoryBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        Ok(self.store().list())
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        Ok(self.store().read(mutex))
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        Ok(self.store().evict(mutex, &condition))
    }

    async fn probe(&self) -> Result<Probe> {
        let clock = self.store().clock();
        let before = clock.now();
        self.store().list();
        let finding = Finding::new(
            "only this process has these mutexes: another process can hold them at the same time",
            "use sqlite:PATH on one host, or a server",
        );
        Ok(Probe { server: "memory".into(), round_trip: clock.now() - before, findings: vec![finding] })
    }
}
