//! A store over any controllers, on one thread, and blocks of known contents.

use std::sync::Arc;

use anyhow::Context;
use nvme_driver::{Bus, Clock, Controller, ControllerOptions};
use objstore::{Format, KvShape, Namespace, Store, StoreConfig, StoreDevice, StoreOptions};
use ripieno_testkit::{KvMemory, inline_executor};

/// Settings of a [`Rig`].
#[derive(Debug, Clone)]
pub struct Plan {
    /// Shape of the KV blocks.
    pub shape: KvShape,
    /// KV blocks of the engine.
    pub blocks: u32,
    /// Options of the driver.
    pub driver: ControllerOptions,
    /// Format of the store, except for its shape.
    pub format: Format,
    /// Options of the store. Its time is always the clock's.
    pub store: StoreOptions,
}

/// A store and the engine's memory.
#[derive(Debug)]
pub struct Rig {
    /// The store.
    pub store: Store,
    /// The engine's blocks.
    pub kv: KvMemory,
}

impl Rig {
    /// Opens a store over the controllers of `buses`, which share one address space.
    pub fn open(
        buses: &[Arc<dyn Bus>],
        clock: Arc<dyn Clock>,
        plan: &Plan,
    ) -> anyhow::Result<Self> {
        let mut devices = Vec::new();
        for bus in buses {
            let controller = Controller::attach(bus.clone(), clock.clone(), plan.driver.clone())?;
            devices.push(StoreDevice::new(controller));
        }
        let space = buses.first().context("no controllers")?.dma();
        let kv = KvMemory::new(&**space, plan.shape, plan.blocks);
        let config = StoreConfig {
            devices,
            clock: clock.clone(),
            executor: inline_executor(clock),
            shape: plan.shape,
            pool: kv.pool.clone(),
            gpu: None,
            options: StoreOptions { virtual_time: true, ..plan.store.clone() },
            namespace: Namespace::default(),
        };
        let store = Store::create(config, &Format { shape: plan.shape, ..plan.format.clone() })?;
        Ok(Self { store, kv })
    }
}
