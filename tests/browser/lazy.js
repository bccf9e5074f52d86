// Makes pipelines when they are first used. The software GPU takes a second or more to compile a large one, and most tests need
// few of those that a model has. Nothing else changes.

const waiting = new WeakMap();

const real = (pipeline) => {
  const make = waiting.get(pipeline);
  if (typeof make === "function") waiting.set(pipeline, make());
  return waiting.get(pipeline) ?? pipeline;
};

const make = GPUDevice.prototype.createComputePipeline;
GPUDevice.prototype.createComputePipeline = function (descriptor) {
  const pipeline = Object.create(GPUComputePipeline.prototype);
  waiting.set(pipeline, () => make.call(this, descriptor));
  return pipeline;
};
const layout = GPUComputePipeline.prototype.getBindGroupLayout;
GPUComputePipeline.prototype.getBindGroupLayout = function (index) {
  return layout.call(real(this), index);
};
const set = GPUComputePassEncoder.prototype.setPipeline;
GPUComputePassEncoder.prototype.setPipeline = function (pipeline) {
  set.call(this, real(pipeline));
};
